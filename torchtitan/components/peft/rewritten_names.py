"""Names of layers that peft treats as experts, or refuses.

When peft 0.21 opens an adapter on a class whose experts transformers 5 fused, it converts
`target_modules` as if transformers 4 had written them: it takes layers with the names that experts
had for experts, wherever they are. So it drops the adapters of dense networks and shared experts,
whose last names are the same. Full names and regular expressions do not help, since peft compares
the last part of each; `target_parameters` are left as they are.
"""

_MIXTRAL = frozenset({"gate", "w1", "w2", "w3"})
_QWEN = frozenset({"gate", "gate_proj", "up_proj", "down_proj"})

REWRITTEN_NAMES = {
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _MIXTRAL),
    **dict.fromkeys(
        (
            *(
                "afmoe",
                "beam",
                "cohere2_moe",
                "deepseek_v2",
                "deepseek_v3",
                "deepseek_v32",
                "dots1",
            ),
            *(
                "ernie4_5_moe",
                "exaone_moe",
                "flex_olmo",
                "glm4_moe",
                "glm4_moe_lite",
                "glm4v_moe",
                "glm_moe_dsa",
            ),
            *(
                "hunyuan_v1_moe",
                "longcat_flash",
                "mellum",
                "olmoe",
                "qwen3_moe",
                "qwen3_next",
                "qwen3_omni_moe",
            ),
            *("qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "solar_open"),
        ),
        _QWEN,
    ),
}
"""`model_type` of transformers 5.23 → last names of layers that peft 0.21 reads as experts."""

REFUSED_NAMES = dict.fromkeys(
    ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"),
    frozenset({"conv1d", "out_proj"}),
)
"""`model_type` → last names of layers that peft 0.21 refuses, since kernels of Mamba read their
weights."""
