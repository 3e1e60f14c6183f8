"""Distillation: a student learns the next-token distributions of a teacher with the same tokenizer.

    --module distillation --config sft --hf_assets_path STUDENT --teacher.path TEACHER --dataloader.dataset my.jsonl

`pretrain`, `scratch` and `sft` are as in `auto`; `debugmodel` is a small student for the stories, whose teacher is
a checkpoint of `llama3`'s `debugmodel`. `--loss.kind` selects the divergence (`torchtitan.components.distillation`).
Metrics and validation report its mean, and the cross entropy of the student. The teacher has any size and family, is
sharded like the student, and is not saved in checkpoints.
"""
