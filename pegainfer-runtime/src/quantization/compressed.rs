//! `quantization_config` of compressed-tensors.

use super::description::{Described, group_size, names, note_activations};
use super::rules::{Modules, Rules, Scheme};
use crate::config_file::{ConfigError, ConfigFile, text, unsupported};
use pegainfer_core::weights::grouped::{Offset, ScaleDType};
use pegainfer_kernels::cpu::weights::BLOCK;
use serde_json::{Value, json};

/// Supported formats, for refusals.
const FORMATS: &str = "pack-quantized (4 bits), nvfp4-pack-quantized, mxfp4-pack-quantized, float-quantized, \
                       naive-quantized (FP8) and dense";

/// Rules of all groups. `never`: modules that stay bf16.
pub(super) fn parse(file: &ConfigFile, config: &Value, never: &[&str]) -> Result<Described, ConfigError> {
    let sparsity = &config["sparsity_config"]["format"];
    if !sparsity.is_null() && *sparsity != "dense" {
        return Err(unsupported("quantization_config.sparsity_config.format", text(sparsity), "dense weights"));
    }
    let mut rules = Rules::never(never);
    for name in names(file, config, "ignore")? {
        if let Some(modules) = modules(&name) {
            rules.add(modules, Scheme::Bf16);
        }
    }
    let Some(groups) = config["config_groups"].as_object() else {
        return Err(file.invalid("quantization_config.config_groups is missing"));
    };
    let (mut targets, mut rounds_activations) = (Vec::new(), false);
    for group in groups.values() {
        let format = [&group["format"], &config["format"]].into_iter().find(|format| !format.is_null());
        let scheme = scheme(file, format.unwrap_or(&Value::Null), &group["weights"])?;
        rounds_activations |= !group["input_activations"].is_null();
        targets.extend(names(file, group, "targets")?.into_iter().map(|target| (target, scheme)));
    }
    // Exact names come first, then patterns, then classes.
    targets.sort_by_key(|(target, _)| if is_class(target) { 2 } else { u8::from(target.starts_with("re:")) });
    for (target, scheme) in targets {
        if let Some(modules) = modules(&target) {
            rules.add(modules, scheme);
        }
    }
    if rounds_activations {
        note_activations();
    }
    Ok(Described::rules(rules))
}

/// True for a class of modules, such as `Linear`.
fn is_class(target: &str) -> bool {
    !target.contains('.') && target.starts_with(|first: char| first.is_ascii_uppercase())
}

/// Modules of a target, or of an entry of the list of ignored ones.
fn modules(target: &str) -> Option<Modules> {
    match target.strip_prefix("re:") {
        Some(pattern) => Modules::matching(pattern),
        None if is_class(target) => Some(Modules::Every),
        None => Some(Modules::Named(target.to_owned())),
    }
}

/// Scheme of the weights of a group.
fn scheme(file: &ConfigFile, format: &Value, weights: &Value) -> Result<Scheme, ConfigError> {
    let number = format!("{} of {} bits", text(&weights["type"]), weights["num_bits"]);
    let refused = |served| Err(unsupported("quantization_config.config_groups.weights", &number, served));
    let (int, float) = (weights["type"] == "int", weights["type"] == "float");
    match format.as_str() {
        Some("pack-quantized") if int && weights["num_bits"] == 4 => {
            let offset = if weights["symmetric"] == false { Offset::Zero } else { Offset::None };
            let group = if weights["strategy"] == "channel" { None } else { group_size(file, weights)? };
            match weights["actorder"].as_str() {
                Some("group") => {
                    let field = "quantization_config.config_groups.weights.actorder";
                    Err(unsupported(field, "group", "actorder null, weight and static"))
                }
                _ => Ok(Scheme::Int4(group, ScaleDType::Bf16, offset)),
            }
        }
        Some("pack-quantized") => refused("integers of 4 bits in pack-quantized"),
        Some("nvfp4-pack-quantized") => Ok(Scheme::Nvfp4),
        Some("mxfp4-pack-quantized") => Ok(Scheme::Mxfp4),
        Some("float-quantized" | "naive-quantized") if float && weights["num_bits"] == 8 => {
            if weights["strategy"] != "block" {
                return Ok(Scheme::Fp8Rows(ScaleDType::Bf16));
            }
            let block = &weights["block_structure"];
            match *block == json!([BLOCK, BLOCK]) {
                true => Ok(Scheme::Fp8),
                false => {
                    let field = "quantization_config.config_groups.weights.block_structure";
                    Err(unsupported(field, text(block), "blocks of 128 x 128"))
                }
            }
        }
        Some("float-quantized" | "naive-quantized" | "int-quantized") => refused("FP8 in float-quantized"),
        Some("dense") => Ok(Scheme::Bf16),
        _ => Err(unsupported("quantization_config.format", text(format), FORMATS)),
    }
}
