//! Whether a ledger was measured with a given model and card.

use pegainfer_core::ledger::Header;
use pegainfer_models::args::{EngineArgs, QuantizationArg};

/// The model or the formats of a ledger, where they are not those of the model from `source` with these flags.
pub fn other_model(header: &Header, source: &str, args: &EngineArgs, kv_cache_dtype: &str) -> Option<String> {
    let quantization = (args.formats.quantization == Some(QuantizationArg::Fp8)).then_some("fp8");
    if directory(&header.model) != directory(source) {
        Some(format!("the model {}", header.model))
    } else if header.quantization.as_deref() != quantization || header.kv_cache_dtype != kv_cache_dtype {
        Some("other formats of weights or KV cache".to_owned())
    } else {
        None
    }
}

/// The card in `cuda:0 (NVIDIA H200)`, the cards in `cuda:2 to cuda:3 (2 x NVIDIA H200)`.
pub fn card(device: &str) -> &str {
    device.split_once(" (").map_or(device, |(_, card)| card)
}

/// The last part of the path or id of a model, by which ledgers of other machines name it.
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
