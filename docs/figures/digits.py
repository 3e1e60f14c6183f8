"""Data, model and score of the example in docs/images.md:

    python docs/figures/digits.py prepare FOLDER    # needs scikit-learn, which brings the images
    python docs/figures/digits.py score FOLDER MODEL
    python docs/figures/digits.py draw FOLDER MODEL REWARDED

`prepare` writes 1,797 handwritten digits as images, rows for training and for the test, and a small
SmolVLM with random weights. `score` asks a trained model about the digits of the test, by
transformers alone. `draw` draws some of them with its answers, the loss of its run, and the reward
of the run of the model REWARDED.
"""

import base64
import io
import json
import sys
from html import escape
from pathlib import Path

import torch
from PIL import Image
from run_curves import COLORS, HEIGHT, WIDTH, panel, points

QUESTION = "Which digit is this?"
N_TEST = 360
SIDE = 32
TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{ '<image>' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<image>", "<fake_token_around_image>", "<global-img>"),
)


def prepare(folder: Path) -> None:
    """Write images, rows and a model with random weights."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    (folder / "images").mkdir(parents=True)
    rows = []
    prompts = []
    questions = []
    for number, (values, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        image = Image.fromarray((values / 16 * 255).round().astype("uint8"))
        name = f"images/{number}.png"
        image.resize((SIDE, SIDE), Image.Resampling.NEAREST).convert("RGB").save(folder / name)
        question = [{"type": "image", "image": name}, {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": question}]
        messages.append({"role": "assistant", "content": str(label)})
        rows.append(json.dumps({"messages": messages}) + "\n")
        choices = {"choices": [str(digit) for digit in range(10)], "gold": int(label)}
        questions.append(json.dumps({"query": QUESTION, "image": name, **choices}) + "\n")
        prompts.append(json.dumps({"messages": messages[:1], "answer": str(label)}) + "\n")
    (folder / "test.jsonl").write_text("".join(rows[:N_TEST]))
    (folder / "questions.jsonl").write_text("".join(questions[:N_TEST]))
    (folder / "train.jsonl").write_text("".join(rows[N_TEST:]))
    (folder / "prompts.jsonl").write_text("".join(prompts[N_TEST:]))
    write_model(folder / "model")


def write_model(folder: Path) -> None:
    """Write a small SmolVLM with random weights, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in SPECIAL}
    vision = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3}
    vision |= {"num_attention_heads": 4, "image_size": SIDE, "patch_size": 4}
    text = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 256}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
    text |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512}
    tokens = {"bos_token_id": None, "eos_token_id": ids["<|im_end|>"]}
    tokens["pad_token_id"] = ids["<|endoftext|>"]
    config = SmolVLMConfig(
        vision_config=vision,
        text_config=text | tokens,
        image_token_id=ids["<image>"],
        scale_factor=4,
        **tokens,
    )
    torch.manual_seed(0)
    model = SmolVLMForConditionalGeneration(config)
    model.save_pretrained(folder)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        },
        "preprocessor_config.json": {
            "image_processor_type": "SmolVLMImageProcessor",
            "do_image_splitting": False,
            "size": {"longest_edge": SIDE},
            "max_image_size": {"longest_edge": SIDE},
        },
        "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def score(folder: Path, checkpoint: Path) -> list[tuple[Path, str, str]]:
    """Print how many digits of the test the model names; return each image, label and answer."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    image_processor = AutoImageProcessor.from_pretrained(checkpoint, backend="pil")
    model = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    question = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    around = "<fake_token_around_image>"
    text = text.replace("<image>", f"{around}<global-img>{'<image>' * 4}{around}")
    ids = tokenizer(text, return_tensors="pt").input_ids
    rows = map(json.loads, (folder / "test.jsonl").read_text().splitlines())
    turns = [row["messages"] for row in rows]
    paths = [folder / question["content"][0]["image"] for question, _ in turns]
    pixels = image_processor([[Image.open(path)] for path in paths], return_tensors="pt")
    output = model.generate(
        input_ids=ids.expand(len(paths), -1), **pixels, max_new_tokens=4, do_sample=False
    )
    answers = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    labels = [answer["content"] for _, answer in turns]
    examples = list(zip(paths, labels, answers, strict=True))
    n_right = sum(label == answer for _, label, answer in examples)
    print(f"{n_right} of {len(examples)} digits: {n_right / len(examples):.1%}")
    return examples


def draw(examples: list[tuple[Path, str, str]], trained: Path, rewarded: Path) -> str:
    """Return a figure of digits with the model's answers, wrong ones first, and of the curves of
    two runs."""
    wrong = [example for example in examples if example[1] != example[2]][:4]
    right = [example for example in examples if example[1] == example[2]]
    shown = [*wrong, *right][:15]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {3 * WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
    ]
    for number, (path, label, answer) in enumerate(shown):
        x = 12 + 66 * (number % 5)
        y = 10 + 76 * (number // 5)
        buffer = io.BytesIO()
        Image.open(path).save(buffer, "PNG")
        data = base64.b64encode(buffer.getvalue()).decode()
        parts.append(
            f'<image x="{x}" y="{y}" width="48" height="48" image-rendering="pixelated" '
            f'href="data:image/png;base64,{data}"/>'
        )
        color = "#444" if label == answer else COLORS[1]
        note = answer if label == answer else f"{answer}, not {label}"
        parts.append(f'<text x="{x}" y="{y + 63}" fill="{color}">{escape(note)}</text>')
    loss = [("", points(trained, "loss"))]
    reward = [("", points(rewarded, "reward"))]
    parts += [
        *panel("training loss (nats per token)", loss, WIDTH),
        *panel("reward of sampled answers", reward, 2 * WIDTH),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    elif sys.argv[1] == "score":
        score(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        trained, rewarded = (Path(path).parent.parent for path in sys.argv[3:])
        figure = draw(score(Path(sys.argv[2]), Path(sys.argv[3])), trained, rewarded)
        (Path(__file__).parent / "digits.svg").write_text(figure)
