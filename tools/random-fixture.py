#!/usr/bin/env python3
"""Makes a checkpoint of random weights with the shape of a Qwen3 config.json, and what transformers says of it.

    tools/random-fixture.py CONFIG_DIR OUT_DIR
    PEGAINFER_TEST_DEVICE=cuda PEGAINFER_TEST_MODEL_PATH=OUT_DIR cargo test --release -p pegainfer-qwen3-4b --test e2e -- \
        every_step greedy

OUT_DIR gets config.json, model.safetensors (bf16) and fixture.json: greedy continuations of random prompts, the margin
between the two largest logits at each step, and the top 20 log-probabilities, computed in float32 from the bf16 weights. Its
limits are taken from what transformers itself differs by in bf16: random layers amplify rounding more than trained ones.
Needs torch, transformers, safetensors and, for large shapes, a GPU.
"""
import json
import pathlib
import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

LENGTHS, EACH, STEPS, TOP = (5, 48, 300, 900), 2, 64, 20


def main():
    source, out = map(pathlib.Path, sys.argv[1:3])
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Qwen3Config.from_pretrained(source)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    # Large embeddings keep the logits apart: the two largest of 150,000 would otherwise be within rounding.
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=0.1 if "embed" in name else 0.02)
    model.to(torch.bfloat16).save_pretrained(out)
    # Loaded again, because the cast has rounded the frequencies of the rotation, too.
    load = lambda dtype: Qwen3ForCausalLM.from_pretrained(out, dtype=dtype).to(device).eval()
    model, exact = load(torch.bfloat16), load(torch.float32)
    cases = [case for n in LENGTHS for case in continuations(exact, config.vocab_size, n, device)]
    errors = [error for case in cases for error in rounding(model, case, device)]
    mean, most = sum(errors) / len(errors), max(errors)
    print(f"transformers in bf16: log-probability error mean {mean:.4f}, max {most:.4f}")
    limits = {"margin": 2 * most, "mean": 1.25 * mean, "max": 1.25 * most, "close": 0.9}
    fixture = {"model": "random", "dtype": "float32", "device": device, "limits": limits, "cases": cases}
    (out / "fixture.json").write_text(json.dumps(fixture))
    margins = sorted(m for case in cases for m in case["margins"])
    print(f"{len(margins)} steps, margin p10 {margins[len(margins) // 10]:.3f}, median {margins[len(margins) // 2]:.3f}")


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
