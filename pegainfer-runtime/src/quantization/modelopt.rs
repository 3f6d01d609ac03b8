//! `quantization_config` of NVIDIA's modelopt, and its older hf_quant_config.json.

use super::description::{Described, names, note_activations};
use super::rules::{Modules, Rules, Scheme};
use crate::config_file::{ConfigError, ConfigFile, text, unsupported};
use pegainfer_core::weights::grouped::ScaleDType;
use serde_json::Value;

/// Rules of all modules. `never`: modules that stay bf16.
pub(super) fn parse(file: &ConfigFile, config: &Value, never: &[&str]) -> Result<Described, ConfigError> {
    let mut rules = Rules::never(never);
    for field in ["ignore", "exclude_modules"] {
        for name in names(file, config, field)? {
            let modules = if name.contains('*') { Modules::wildcard(&name) } else { Some(Modules::Named(name)) };
            if let Some(modules) = modules {
                rules.add(modules, Scheme::Bf16);
            }
        }
    }
    let algo = &config["quant_algo"];
    if *algo == "MIXED_PRECISION" {
        for (name, layer) in config["quantized_layers"].as_object().into_iter().flatten() {
            rules.add(Modules::Named(name.clone()), scheme(&layer["quant_algo"])?);
        }
    } else {
        rules.add(Modules::Every, scheme(algo)?);
    }
    Ok(Described::rules(rules))
}

fn scheme(algo: &Value) -> Result<Scheme, ConfigError> {
    match algo.as_str() {
        Some("NVFP4") => {
            note_activations();
            Ok(Scheme::Nvfp4)
        }
        Some("W4A16_NVFP4") => Ok(Scheme::Nvfp4),
        Some("FP8" | "FP8_PER_CHANNEL_PER_TOKEN") => {
            note_activations();
            Ok(Scheme::Fp8Rows(ScaleDType::F32))
        }
        _ => {
            let served = "FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4, W4A16_NVFP4 and MIXED_PRECISION of them";
            Err(unsupported("quantization_config.quant_algo", text(algo), served))
        }
    }
}
