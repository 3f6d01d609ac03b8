//! `quantization_config` of config.json, or the older files next to it. Unsupported methods are refused by name.

use super::description::{Described, group_size, names};
use super::rules::{Modules, Rules, Scheme};
use super::{compressed, modelopt};
use crate::config_file::{ConfigError, ConfigFile, text, unsupported};
use pegainfer_core::weights::grouped::{Offset, ScaleDType, ZeroPoints};
use pegainfer_kernels::cpu::weights::BLOCK;
use serde_json::{Map, Value, json};

/// Supported methods, for refusals.
const SERVED: &str = "bf16 weights, and quant_method fp8 (e4m3, blocks of 128 x 128, dynamic activations), awq, gptq, \
                      auto-round, compressed-tensors and modelopt with 4-bit or FP8 weights";

/// Reads the description; `None` if there is none. `never`: modules that stay bf16.
pub(super) fn read(file: &ConfigFile, never: &[&str]) -> Result<Option<Described>, ConfigError> {
    let config = file.get("quantization_config");
    if !(config.is_null() || config.as_object().is_some_and(Map::is_empty)) {
        return parse(file, config, never).map(Some);
    }
    if let Some(config) = file.neighbour("quantize_config.json")? {
        let mut config = config;
        if config["quant_method"].is_null() {
            config["quant_method"] = json!("gptq");
        }
        return parse(file, &config, never).map(Some);
    }
    match file.neighbour("hf_quant_config.json")? {
        Some(config) => modelopt::parse(file, &config["quantization"], never).map(Some),
        None => Ok(None),
    }
}

fn parse(file: &ConfigFile, config: &Value, never: &[&str]) -> Result<Described, ConfigError> {
    let method = config.get("quant_method").or(config.get("quant_algo")).unwrap_or(config);
    let name = text(method).to_lowercase();
    match name.as_str() {
        "fp8" => fp8(file, config, never),
        "awq" => awq(file, config, never),
        "gptq" | "gptq_v2" => gptq(file, config, never),
        "auto-round" | "auto_round" | "intel/auto-round" => auto_round(file, config, never),
        "compressed-tensors" => compressed::parse(file, config, never),
        "modelopt" | "modelopt_fp4" => modelopt::parse(file, config, never),
        _ if config.get("quant_method").is_none() && config.get("quant_algo").is_some() => {
            modelopt::parse(file, config, never)
        }
        _ => Err(unsupported("quantization_config.quant_method", text(method), SERVED)),
    }
}

/// Refuses the first of these fields of `config` that has another value than the served one; a missing field has it.
fn require(
    config: &Value,
    fields: impl IntoIterator<Item = (&'static str, &'static str, Value, &'static str)>,
) -> Result<(), ConfigError> {
    for (key, field, served, words) in fields {
        let value = &config[key];
        if !value.is_null() && *value != served {
            return Err(unsupported(field, text(value), words));
        }
    }
    Ok(())
}

/// FP8 of Qwen's and DeepSeek's checkpoints.
fn fp8(file: &ConfigFile, config: &Value, never: &[&str]) -> Result<Described, ConfigError> {
    if config["weight_block_size"].is_null() {
        return Err(unsupported("quantization_config.weight_block_size", "null", SERVED));
    }
    require(
        config,
        [
            ("activation_scheme", "quantization_config.activation_scheme", json!("dynamic"), SERVED),
            ("fmt", "quantization_config.fmt", json!("e4m3"), SERVED),
            ("weight_block_size", "quantization_config.weight_block_size", json!([BLOCK, BLOCK]), SERVED),
        ],
    )?;
    let mut rules = Rules::never(never);
    for name in names(file, config, "modules_to_not_convert")? {
        rules.add(Modules::Named(name), Scheme::Bf16);
    }
    rules.add_fp8();
    Ok(Described::rules(rules))
}

const BITS: (&str, &str, &str) = ("bits", "quantization_config.bits", "4 bits");

fn awq(file: &ConfigFile, config: &Value, never: &[&str]) -> Result<Described, ConfigError> {
    let (bits, field, words) = BITS;
    require(config, [(bits, field, json!(4), words), ("w_bit", "quantization_config.w_bit", json!(4), words)])?;
    let version = config["version"].as_str().unwrap_or("gemm").to_lowercase();
    if version != "gemm" {
        return Err(unsupported("quantization_config.version", version, "version gemm of AWQ"));
    }
    let mut rules = Rules::never(never);
    rules.add(Modules::Named("lm_head".to_owned()), Scheme::Bf16);
    for name in names(file, config, "modules_to_not_convert")? {
        rules.add(Modules::Containing(name), Scheme::Bf16);
    }
    rules.add(Modules::Every, Scheme::Int4(group_size(file, config)?, ScaleDType::F16, Offset::Zero));
    Ok(Described::rules(rules))
}

/// Scheme and zero points of GPTQ tensors.
fn int4(file: &ConfigFile, config: &Value, less_one: bool) -> Result<(Scheme, ZeroPoints), ConfigError> {
    let symmetric = config["sym"].as_bool().unwrap_or(false);
    let offset = if symmetric { Offset::None } else { Offset::Zero };
    let scheme = Scheme::Int4(group_size(file, config)?, ScaleDType::F16, offset);
    Ok((scheme, ZeroPoints { less_one, symmetric }))
}

fn gptq(file: &ConfigFile, config: &Value, never: &[&str]) -> Result<Described, ConfigError> {
    let (bits, field, words) = BITS;
    require(
        config,
        [
            (bits, field, json!(4), words),
            ("pack_dtype", "quantization_config.pack_dtype", json!("int32"), "words of int32"),
        ],
    )?;
    let format = match (&config["checkpoint_format"], &config["format"]) {
        (Value::Null, Value::Null) => text(&config["quant_method"]),
        (Value::Null, format) | (format, _) => text(format),
    };
    let less_one = match format.to_lowercase().as_str() {
        "gptq" => true,
        "gptq_v2" => false,
        _ => return Err(unsupported("quantization_config.checkpoint_format", format, "gptq and gptq_v2")),
    };
    let (scheme, zeros) = int4(file, config, less_one)?;
    let mut rules = Rules::never(never);
    if config["lm_head"] != true {
        rules.add(Modules::Named("lm_head".to_owned()), Scheme::Bf16);
    }
    for (pattern, changes) in config["dynamic"].as_object().into_iter().flatten() {
        let (pattern, scheme) = match pattern.strip_prefix("-:") {
            Some(pattern) => (pattern, Scheme::Bf16),
            None => (pattern.strip_prefix("+:").unwrap_or(pattern), dynamic(file, config, changes)?),
        };
        if let Some(modules) = Modules::matching(pattern) {
            rules.add(modules, scheme);
        }
    }
    rules.add(Modules::Every, scheme);
    Ok(Described { rules, zeros })
}

/// Scheme of modules for which these keys differ from those of `config`.
fn dynamic(file: &ConfigFile, config: &Value, changes: &Value) -> Result<Scheme, ConfigError> {
    let served = "dynamic rules of 4 bits that differ in group_size";
    let symmetric = config["sym"].as_bool().unwrap_or(false);
    require(
        changes,
        [
            ("bits", "quantization_config.dynamic.bits", json!(4), served),
            ("sym", "quantization_config.dynamic.sym", json!(symmetric), served),
        ],
    )?;
    let mut changed = config.clone();
    if !changes["group_size"].is_null() {
        changed["group_size"] = changes["group_size"].clone();
    }
    int4(file, &changed, true).map(|(scheme, _)| scheme)
}

fn auto_round(file: &ConfigFile, config: &Value, never: &[&str]) -> Result<Described, ConfigError> {
    let (bits, field, words) = BITS;
    require(
        config,
        [
            (bits, field, json!(4), words),
            ("data_type", "quantization_config.data_type", json!("int"), "integers of 4 bits"),
        ],
    )?;
    let packing = config["packing_format"].as_str().unwrap_or("auto_round").to_lowercase();
    let less_one = match packing.as_str() {
        "auto_round:auto_gptq" | "auto_gptq" => true,
        "auto_round" | "auto_round:gptqmodel" | "auto_round:auto_awq" | "auto_awq" => false,
        _ => {
            let served = "auto_round, auto_round:auto_gptq, auto_round:gptqmodel and auto_round:auto_awq";
            return Err(unsupported("quantization_config.packing_format", packing, served));
        }
    };
    let (scheme, zeros) = int4(file, config, less_one)?;
    let mut rules = Rules::never(never);
    for (name, changes) in config["extra_config"].as_object().into_iter().flatten() {
        let scheme = match changes["bits"].as_u64() {
            Some(16 | 32) => Scheme::Bf16,
            None | Some(4) => scheme,
            Some(bits) => return Err(unsupported("quantization_config.extra_config.bits", bits, "4 and 16 bits")),
        };
        let is_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_'));
        let modules = if is_name { Some(Modules::Named(name.clone())) } else { Modules::matching(name) };
        if let Some(modules) = modules {
            rules.add(modules, scheme);
        }
    }
    rules.add(Modules::Named("lm_head".to_owned()), Scheme::Bf16);
    rules.add(Modules::Every, scheme);
    Ok(Described { rules, zeros })
}
