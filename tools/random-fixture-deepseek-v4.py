#!/usr/bin/env python3
"""Makes a DeepSeek-V4 of full width with few layers and random weights, and its reference outputs from transformers.

    tools/random-fixture-deepseek-v4.py OUT_DIR [--quantize]
    PEGAINFER_TEST_DEVICE=cuda PEGAINFER_TEST_MODEL_PATH=OUT_DIR cargo test --release -p pegainfer-deepseek-v4 --test e2e -- \\
        --include-ignored    # leave it out for FP8 and FP4 weights, where activations are also rounded

OUT_DIR gets a checkpoint with the official tensor names, in bf16 or with --quantize in FP8 and FP4, and fixture.json: greedy
continuations of random prompts, the margin between the two largest logits at each step, and the top log-probabilities, computed in
float32 from the checkpoint's dequantized weights. Its limits come from transformers' own differences in bf16: random layers
amplify rounding more than trained ones. Needs torch, transformers, safetensors and a GPU.
"""
import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

RATIOS, HASHED, EXPERTS, VOCAB = [0, 4, 128, 4], 1, 16, 4096
LENGTHS, STEPS, TOP = (5, 60, 127, 250, 400, 600, 800, 900), 64, 20
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=4096, moe_intermediate_size=2048, num_hidden_layers=len(RATIOS), num_attention_heads=64, head_dim=512,
    q_lora_rank=1024, n_routed_experts=EXPERTS, num_experts_per_tok=6, o_groups=8, o_lora_rank=1024, index_n_heads=64, index_head_dim=128,
    index_topk=128, qk_rope_head_dim=64, num_hash_layers=HASHED, compress_ratios=RATIOS, num_nextn_predict_layers=0, sliding_window=128,
    max_position_embeddings=4096, rope_theta=10000, compress_rope_theta=160000, bos_token_id=0, eos_token_id=1,
    rope_scaling={"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
)
OFFICIAL = dict(
    architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", attention_bias=False, attention_dropout=0.0, hc_eps=1e-06, hc_mult=4,
    hc_sinkhorn_iters=20, hidden_act="silu", initializer_range=0.02, n_shared_experts=1, norm_topk_prob=True, num_key_value_heads=1,
    rms_norm_eps=1e-06, routed_scaling_factor=1.5, scoring_func="sqrtsoftplus", swiglu_limit=10.0, tie_word_embeddings=False,
    topk_method="noaux_tc", torch_dtype="bfloat16", use_cache=True,
)
FORMATS = dict(expert_dtype="fp4", quantization_config=dict(
    activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", scale_fmt="ue8m0", weight_block_size=[128, 128]))
ATTENTION = {"wq_a": "q_a_proj", "q_norm": "q_a_norm", "wq_b": "q_b_proj", "wkv": "kv_proj", "kv_norm": "kv_norm", "wo_a": "o_a_proj",
             "wo_b": "o_b_proj"}
COMPRESSOR = {"ape": "position_bias", "wkv.weight": "kv_proj.weight", "wgate.weight": "gate_proj.weight", "norm.weight": "kv_norm.weight"}


def names():
    """Official names of the tensors by transformers' names, except for the routed experts."""
    of = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight", "norm.weight": "model.norm.weight"}
    of |= {f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")}
    for i, ratio in enumerate(RATIOS):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        attn, ffn, attention, mlp = ours + "attn.", ours + "ffn.", theirs + "self_attn.", theirs + "mlp."
        of |= {f"{ours}hc_{b}_{part}": f"{theirs}{b}_hc.{part}" for b in ("attn", "ffn") for part in ("fn", "base", "scale")}
        of |= {ours + "attn_norm.weight": theirs + "input_layernorm.weight", ours + "ffn_norm.weight": theirs + "post_attention_layernorm.weight"}
        of |= {f"{attn}{a}.weight": f"{attention}{b}.weight" for a, b in ATTENTION.items()} | {attn + "attn_sink": attention + "sinks"}
        if ratio:
            of |= {f"{attn}compressor.{a}": f"{attention}compressor.{b}" for a, b in COMPRESSOR.items()}
        if ratio == 4:
            of |= {f"{attn}indexer.compressor.{a}": f"{attention}compressor.indexer.{b}" for a, b in COMPRESSOR.items()}
            of |= {attn + "indexer.wq_b.weight": attention + "compressor.indexer.q_b_proj.weight",
                   attn + "indexer.weights_proj.weight": attention + "compressor.indexer.scorer.weights_proj.weight"}
        of[ffn + "gate.weight"] = mlp + "gate.weight"
        of |= {ffn + "gate.tid2eid": mlp + "gate.tid2eid"} if i < HASHED else {ffn + "gate.bias": mlp + "gate.e_score_correction_bias"}
        of |= {f"{ffn}shared_experts.{a}.weight": f"{mlp}shared_experts.{b}_proj.weight" for a, b in (("w1", "gate"), ("w2", "down"), ("w3", "up"))}
    return of


def scales(amax, limit):
    """Exponent bytes of the smallest powers of two that bring `amax` to `limit` or below, and their values."""
    exponent = torch.ceil(torch.log2((amax / limit).clamp_min(2.0**-126)))
    return (exponent + 127).to(torch.uint8), torch.exp2(exponent)


def fp8(weight):
    """Codes and scales of blocks of 128 x 128, and their values."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // 128, 128, columns // 128, 128)
    bytes_, scale = scales(blocks.abs().amax((1, 3)), 448)
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(rows, columns), bytes_, (codes.float() * scale[:, None, :, None]).view(rows, columns)


def fp4(weight):
    """Codes, scales and values for E2M1: two codes per byte and a scale per 32 columns of a row."""
    groups = weight.float().unflatten(-1, (-1, 32))
    bytes_, scale = scales(groups.abs().amax(-1), 6)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=weight.device)
    scaled = groups / scale[..., None]
    magnitude = torch.bucketize(scaled.abs(), (values[1:] + values[:-1]) / 2)
    codes = (magnitude + 8 * ((scaled < 0) & (magnitude > 0)).long()).flatten(-2)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8).view(torch.int8)
    return packed, bytes_, (values[magnitude] * scaled.sign() * scale[..., None]).flatten(-2)


def is_fp8(name):
    """True if the official checkpoint has this matrix in FP8."""
    return any(part in name for part in ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "shared_experts")) and name.endswith(".weight")


@torch.no_grad()
def initialise(model, seed=5):
    """Values under which every part of a layer matters."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif name.endswith(("_hc.base", "hc_head.hc_base")):
            parameter.normal_(std=0.1)
            if parameter.numel() == 24:
                parameter[8:] += 2 * torch.eye(4, device=parameter.device).flatten()
        elif name.endswith("scale"):
            parameter.fill_(0.5)
        elif name.endswith(("position_bias", "sinks")):
            parameter.normal_(std=0.3)
        else:
            parameter.normal_(std=0.1 if "lm_head" in name or "embed" in name else 0.02)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(VOCAB, EXPERTS, device=buffer.device).topk(6, dim=-1).indices)
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.05)


@torch.no_grad()
def checkpoint(model, out, quantize):
    """Rounds the model's weights to a checkpoint's, and writes it."""
    state, tensors = model.state_dict(), {}

    def keep(name, weight, format_):
        if format_ is None:
            exact = not weight.is_floating_point() or any(part in name for part in ("hc_", "gate.bias", "attn_sink", "ape"))
            value = weight if exact else weight.bfloat16()
            tensors[name] = value.clone().cpu()
            return value.to(weight.dtype)
        codes, bytes_, values = format_(weight)
        tensors[name], tensors[name[: -len("weight")] + "scale"] = codes.cpu(), bytes_.view(torch.float8_e8m0fnu).cpu()
        return values

    for name, theirs in names().items():
        state[theirs].copy_(keep(name, state[theirs], fp8 if quantize and is_fp8(name) else None))
    for i in range(len(RATIOS)):
        gate_up, down = (state[f"model.layers.{i}.mlp.experts.{part}_proj"] for part in ("gate_up", "down"))
        for e in range(EXPERTS):
            width = gate_up.shape[1] // 2
            for part, weight in (("w1", gate_up[e, :width]), ("w3", gate_up[e, width:]), ("w2", down[e])):
                weight.copy_(keep(f"layers.{i}.ffn.experts.{e}.{part}.weight", weight, fp4 if quantize else None))
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(OFFICIAL | SHAPE | (FORMATS if quantize else {}), indent=2))
    tiny = pathlib.Path(__file__).parent.parent / "models/dsv4-tiny-fp4fp8"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(tiny / name, out)


@torch.no_grad()
def continuation(model, rounded, length):
    """A case of the fixture, and the errors of the top five log-probabilities of each step in the precision of `rounded`."""
    ids = torch.randint(2, VOCAB, (1, length), device="cuda")
    case = {"name": f"{length} tokens", "prompt_ids": ids[0].tolist(), "greedy_ids": [], "margins": [], "top20": []}
    for _ in range(STEPS):
        # The whole text again: a cache would be one more thing to trust.
        top = model(ids, use_cache=False).logits[0, -1].log_softmax(-1).topk(TOP)
        ids = torch.cat([ids, top.indices[None, :1]], 1)
        case["greedy_ids"].append(top.indices[0].item())
        case["margins"].append((top.values[0] - top.values[1]).item())
        case["top20"].append({"ids": top.indices.tolist(), "logprobs": top.values.tolist()})
    theirs = rounded(ids[:, :-1], use_cache=False).logits[0, -STEPS:].float().log_softmax(-1)
    errors = [abs(theirs[i, t].item() - value) for i, top in enumerate(case["top20"]) for t, value in zip(top["ids"][:5], top["logprobs"])]
    return case, errors


def main():
    out, quantize = pathlib.Path(sys.argv[1]), "--quantize" in sys.argv
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.device("cuda"):
        exact, rounded = (
            DeepseekV4ForCausalLM._from_config(DeepseekV4Config(**SHAPE), dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16)
        )
    initialise(exact)
    checkpoint(exact, out, quantize)
    rounded.load_state_dict(exact.state_dict())
    cases, errors = zip(*(continuation(exact, rounded, length) for length in LENGTHS))
    errors = [error for case in errors for error in case]
    mean, largest = sum(errors) / len(errors), max(errors)
    print(f"transformers in bf16: log-probability error mean {mean:.4f}, max {largest:.4f}")
    limits = {"margin": 2 * largest, "mean": 1.25 * mean, "max": 1.25 * largest, "close": 0.9}
    fixture = {"model": "random", "dtype": "float32", "device": "cuda", "limits": limits, "cases": cases}
    (out / "fixture.json").write_text(json.dumps(fixture))


main()
