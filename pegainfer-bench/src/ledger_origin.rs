//! Compares a ledger's model and card with given ones.

use pegainfer_core::ledger::Header;
use pegainfer_models::args::EngineArgs;

/// The model or formats of a ledger, if they differ from the model from `source` with these flags.
pub fn other_model(header: &Header, source: &str, args: &EngineArgs, kv_cache_dtype: &str) -> Option<String> {
    let quantization = args.formats.quantization.map(|format| format.at_load().name());
    if directory(&header.model) != directory(source) {
        Some(format!("the model {}", header.model))
    } else if header.quantization.as_deref() != quantization || header.kv_cache_dtype != kv_cache_dtype {
        Some("other formats of weights or KV cache".to_owned())
    } else {
        None
    }
}

/// The card in `cuda:0 (NVIDIA H200)`, or the cards in `cuda:2 to cuda:3 (2 x NVIDIA H200)`.
pub fn card(device: &str) -> &str {
    device.split_once(" (").map_or(device, |(_, card)| card)
}

/// The last part of a model's path or id, which identifies it in ledgers of other machines.
fn directory(model: &str) -> &str {
    model.trim_end_matches('/').rsplit('/').next().unwrap_or(model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_and_cards_are_the_same_in_other_places() {
        assert_eq!(directory("/models/Qwen3-4B/"), directory("Qwen/Qwen3-4B"));
        assert_ne!(directory("Qwen3-4B"), directory("Qwen3-4B-FP8"));
        assert_eq!(card("cuda:0 (NVIDIA H200)"), card("cuda:3 (NVIDIA H200)"));
        assert_eq!(card("cuda:0 to cuda:1 (2 x NVIDIA H200)"), card("cuda:2 to cuda:3 (2 x NVIDIA H200)"));
        assert_ne!(card("cuda:0 to cuda:1 (2 x NVIDIA H200)"), card("cuda:0 (NVIDIA H200)"));
        assert_ne!(card("cpu (avx2, 1 thread)"), card("cpu (avx2, 2 threads)"));
    }
}
