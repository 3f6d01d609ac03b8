#!/usr/bin/env python3
"""Makes a checkpoint of random weights with the shape of a Qwen3 or Qwen3.5 config.json, and its reference outputs from
transformers.

    tools/random-fixture.py CONFIG_DIR OUT_DIR
    PEGAINFER_TEST_DEVICE=cuda PEGAINFER_TEST_MODEL_PATH=OUT_DIR cargo test --release -p pegainfer-qwen3-4b --test e2e -- \
        every_step greedy

OUT_DIR gets config.json, model.safetensors (bf16) and fixture.json: greedy continuations of random prompts, the margin
between the two largest logits at each step, and the top 20 log-probabilities, computed in float32 from the bf16 weights. Its
limits come from transformers' own differences in bf16: random layers amplify rounding more than trained ones.
Needs torch, transformers, safetensors and, for large shapes, a GPU.
"""
import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

LENGTHS, EACH, STEPS, TOP = (5, 48, 300, 900), 2, 64, 20


def main():
    source, out = map(pathlib.Path, sys.argv[1:3])
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(source)
    text = config.get_text_config()
    # Made in their dtypes: a cast would also round the rotation frequencies.
    with torch.device(device):
        exact, model = (AutoModelForCausalLM.from_config(text, dtype=d).eval() for d in (torch.float32, torch.bfloat16))
    for name, weight in exact.named_parameters():
        initialise(name, weight, text)
        weight.data = weight.data.bfloat16().float()
    # The checkpoints of multimodal models have the text model under another name.
    prefix = "model." if config is text else "model.language_model."
    names = {name: name.replace("model.", prefix, 1) for name in exact.state_dict() if name != "lm_head.weight"}
    if not text.tie_word_embeddings:
        names["lm_head.weight"] = "lm_head.weight"
    save_file({to: exact.state_dict()[name].bfloat16().contiguous().cpu() for name, to in names.items()},
              out / "model.safetensors")
    shutil.copy(source / "config.json", out)
    model.load_state_dict(exact.state_dict())
    cases = [case for n in LENGTHS for case in continuations(exact, text.vocab_size, n, device)]
    errors = [error for case in cases for error in rounding(model, case, device)]
    mean, most = sum(errors) / len(errors), max(errors)
    print(f"transformers in bf16: log-probability error mean {mean:.4f}, max {most:.4f}")
    # Two logits that are each off by the largest error may change places.
    limits = {"margin": 2 * most, "mean": 1.25 * mean, "max": 1.25 * most, "close": 0.9}
    fixture = {"model": "random", "dtype": "float32", "device": device, "limits": limits, "cases": cases}
    (out / "fixture.json").write_text(json.dumps(fixture))
    margins = sorted(m for case in cases for m in case["margins"])
    print(f"{len(margins)} steps, margin p10 {margins[len(margins) // 10]:.3f}, median {margins[len(margins) // 2]:.3f}")


@torch.no_grad()
def initialise(name, weight, config):
    """Values under which every part of a layer matters, and rounding errors do not grow with depth."""
    if name.endswith("A_log"):
        weight.uniform_(1, 16).log_()
    elif name.endswith("dt_bias"):
        weight.uniform_(-4, 1)
    elif "norm" in name:
        # Some norms keep the difference from 1.
        difference = config.model_type.startswith("qwen3_5") and "linear_attn" not in name
        weight.uniform_(0.5 - difference, 1.5 - difference)
    elif "conv1d" in name:
        weight.normal_(std=0.3)
    elif "embed" in name or "lm_head" in name:
        # Large, to keep the logits apart: the two largest of 150,000 would otherwise be within rounding.
        weight.normal_(std=0.1)
    else:
        into_residual = any(part in name for part in ("o_proj", "out_proj", "down_proj"))
        weight.normal_(std=0.02 / (2 * config.num_hidden_layers) ** 0.5 if into_residual else 0.02)


@torch.no_grad()
def continuations(model, vocab, length, device):
    prompts = torch.randint(0, vocab, (EACH, length), device=device)
    cases = [
        {"name": f"{length} tokens, {i}", "prompt_ids": p.tolist(), "greedy_ids": [], "margins": [], "top20": []}
        for i, p in enumerate(prompts)
    ]
    ids, past = prompts, None
    for _ in range(STEPS):
        output = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        past, logprobs = output.past_key_values, output.logits[:, -1].log_softmax(-1)
        top = logprobs.topk(TOP)
        ids = top.indices[:, :1]
        for case, values, indices in zip(cases, top.values.tolist(), top.indices.tolist()):
            case["greedy_ids"].append(indices[0])
            case["margins"].append(values[0] - values[1])
            case["top20"].append({"ids": indices, "logprobs": values})
    return cases


@torch.no_grad()
def rounding(model, case, device):
    """Errors of the top five log-probabilities at each step, in the precision of `model`."""
    ids = torch.tensor([case["prompt_ids"] + case["greedy_ids"][:-1]], device=device)
    logprobs = model(ids, logits_to_keep=STEPS).logits[0].float().log_softmax(-1)
    for ours, top in zip(logprobs, case["top20"]):
        for i, reference in zip(top["ids"][:5], top["logprobs"][:5]):
            yield abs(ours[i].item() - reference)


main()
