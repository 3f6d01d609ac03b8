//! What `quantization_config` says, and fields that several methods have.

use super::rules::Rules;
use crate::config_file::{ConfigError, ConfigFile};
use pegainfer_core::weights::grouped::{StoredFormat, ZeroPoints};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Once;

/// What `quantization_config` says.
#[derive(Debug, PartialEq)]
pub(super) struct Described {
    /// Formats by the names of modules.
    pub rules: Rules,
    /// Zero points of AWQ and GPTQ tensors.
    pub zeros: ZeroPoints,
}

impl Described {
    /// Rules for tensors without zero points that need an explanation.
    pub fn rules(rules: Rules) -> Self {
        Self { rules, zeros: ZeroPoints::default() }
    }
}

/// A list of names; none if the field is missing.
pub(super) fn names(file: &ConfigFile, config: &Value, field: &str) -> Result<Vec<String>, ConfigError> {
    match &config[field] {
        Value::Null => Ok(Vec::new()),
        Value::Array(names) if names.iter().all(Value::is_string) => {
            Ok(names.iter().filter_map(Value::as_str).map(str::to_owned).collect())
        }
        other => Err(file.invalid(format!("quantization_config.{field} is {other}, and must be a list of names"))),
    }
}

/// Columns of a group, `None` for -1 or null: one group for each row.
pub(super) fn group_size(file: &ConfigFile, config: &Value) -> Result<Option<usize>, ConfigError> {
    match &config["group_size"] {
        Value::Null => Ok(None),
        value if value.as_i64() == Some(-1) => Ok(None),
        value => match value.as_u64().filter(|size| (16..=1 << 16).contains(size) && size.is_multiple_of(16)) {
            Some(size) => Ok(Some(size as usize)),
            None => Err(file.invalid(format!(
                "quantization_config.group_size is {value}, and must be a multiple of 16, or -1 for whole rows"
            ))),
        },
    }
}

/// Logs once that activations are not rounded as the checkpoint says.
pub(super) fn note_activations() {
    static NOTED: Once = Once::new();
    NOTED.call_once(|| {
        log::info!(
            "quantization_config also rounds activations: its rule is not followed; `--exact-activations` and \
             `--fp8-prompts` say which activations the engine rounds"
        );
    });
}

/// Logs once that weights with columns in the order of activations, by their names in `stored`, are loaded as bf16.
pub(super) fn note_act_order(stored: &BTreeMap<String, StoredFormat>) {
    static NOTED: Once = Once::new();
    let count = stored.values().filter(|format| matches!(format, StoredFormat::ActOrder(_))).count();
    if count > 0 {
        NOTED.call_once(|| {
            log::warn!(
                "{count} weights have their columns in the order of activations (desc_act) and are widened to bf16, which \
                 takes four times the memory; a checkpoint without desc_act stays in 4 bits"
            );
        });
    }
}
