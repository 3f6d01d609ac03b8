//! adapter_config.json, as PEFT writes it.
//!
//! A field that changes the function and that the engine does not compute is refused by name. An unknown field is refused
//! unless its value says that it is not used.

use super::error::AdapterError;
use super::patterns::{Modules, Numbers};
use serde_json::{Map, Value};
use std::path::Path;

/// Fields that do not change the function of a saved adapter, whatever their values.
const IGNORED: [&str; 16] = [
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
    "velora_config",
    "_name_or_path",
    "_custom_modules",
];

/// Fields that [`AdapterConfig`] reads.
const READ: [&str; 12] = [
    "alpha_pattern",
    "bias",
    "exclude_modules",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "use_rslora",
];

/// Ways to initialise an adapter that leave the base model as it is; others subtract their start from it.
const INITS: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];

/// The fields of adapter_config.json that the weights need.
#[derive(Debug)]
pub struct AdapterConfig {
    rank: usize,
    alpha: f64,
    rank_stabilized: bool,
    ranks: Numbers,
    alphas: Numbers,
    targets: Option<Modules>,
    excluded: Option<Modules>,
    /// Numbers of the layers that have an adapter; `None` for all.
    layers: Option<Vec<u64>>,
}

/// True if a value says that its field is not used.
fn is_unused(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(values) => values.is_empty(),
        _ => false,
    }
}

impl AdapterConfig {
    /// Reads adapter_config.json in `dir`.
    pub fn read(dir: &Path) -> Result<Self, AdapterError> {
        let path = dir.join("adapter_config.json");
        let Ok(text) = std::fs::read_to_string(&path) else { return Err(AdapterError::NoConfig { path }) };
        Self::parse(&text)
    }

    /// Reads the text of adapter_config.json.
    pub fn parse(text: &str) -> Result<Self, AdapterError> {
        let fields: Map<String, Value> = serde_json::from_str(text)
            .map_err(|error| AdapterError::field("the file", format!("is no JSON object: {error}")))?;
        let get = |name: &str| fields.get(name).unwrap_or(&Value::Null);
        if get("peft_type") != "LORA" {
            return Err(AdapterError::field("peft_type", format!("is {}; the engine takes LORA", get("peft_type"))));
        }
        let init = get("init_lora_weights");
        if !matches!(init, Value::Null | Value::Bool(_)) && !INITS.iter().any(|known| init == known) {
            let message = format!("is {init}, which changed the base model; convert the adapter to plain LoRA");
            return Err(AdapterError::field("init_lora_weights", message));
        }
        if !matches!(get("bias"), Value::Null) && get("bias") != "none" {
            return Err(AdapterError::field("bias", format!("is {}; the engine takes none", get("bias"))));
        }
        let known = |name: &str| IGNORED.contains(&name) || READ.contains(&name);
        if let Some((name, value)) = fields.iter().find(|(name, value)| !known(name) && !is_unused(value)) {
            return Err(AdapterError::field(name, format!("is {value}, which the engine does not compute")));
        }
        let wrong =
            |name: &str, expected: &str| AdapterError::field(name, format!("is {}, and must be {expected}", get(name)));
        let rank = get("r").as_u64().filter(|rank| *rank > 0).and_then(|rank| usize::try_from(rank).ok());
        let alpha = get("lora_alpha").as_f64().filter(|alpha| alpha.is_finite());
        let layers = match get("layers_to_transform") {
            Value::Null => None,
            Value::Array(layers) => Some(layers.iter().map(Value::as_u64).collect::<Option<Vec<_>>>()),
            layer => Some(layer.as_u64().map(|layer| vec![layer])),
        };
        Ok(Self {
            rank: rank.ok_or_else(|| wrong("r", "an integer of at least 1"))?,
            alpha: alpha.ok_or_else(|| wrong("lora_alpha", "a number"))?,
            rank_stabilized: match get("use_rslora") {
                Value::Null => false,
                value => value.as_bool().ok_or_else(|| wrong("use_rslora", "true or false"))?,
            },
            ranks: Numbers::read("rank_pattern", get("rank_pattern"))?,
            alphas: Numbers::read("alpha_pattern", get("alpha_pattern"))?,
            targets: Modules::read("target_modules", get("target_modules"))?,
            excluded: Modules::read("exclude_modules", get("exclude_modules"))?,
            layers: match layers {
                None => None,
                Some(layers) => Some(layers.ok_or_else(|| wrong("layers_to_transform", "a list of layer numbers"))?),
            },
        })
    }

    /// Rank of the module with this path.
    pub fn rank(&self, path: &str) -> usize {
        self.ranks.of(path).map_or(self.rank, |rank| rank as usize)
    }

    /// Factor of the module with this path, whose matrices have this rank.
    pub fn scale(&self, path: &str, rank: usize) -> f32 {
        let (alpha, rank) = (self.alphas.of(path).unwrap_or(self.alpha), rank as f64);
        (alpha / if self.rank_stabilized { rank.sqrt() } else { rank }) as f32
    }

    /// True if the configuration lists the layers that have an adapter.
    pub fn lists_layers(&self) -> bool {
        self.layers.is_some()
    }

    /// True if the adapter changes the module with this path.
    pub fn targets(&self, path: &str) -> bool {
        let targeted = self.targets.as_ref().is_some_and(|targets| targets.has(path));
        let excluded = self.excluded.as_ref().is_some_and(|excluded| excluded.has(path));
        targeted
            && !excluded
            && self.layers.as_ref().is_none_or(|layers| layer(path).is_some_and(|i| layers.contains(&i)))
    }
}

/// Number of the layer in a path.
pub(super) fn layer(path: &str) -> Option<u64> {
    path.split('.').find_map(|part| part.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn plain() -> Value {
        json!({"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"})
    }

    #[test]
    fn the_scale_is_that_of_the_matrices() {
        let mut config = plain();
        config["alpha_pattern"] = json!({"v_proj": 6});
        let read = AdapterConfig::parse(&config.to_string()).unwrap();
        assert_eq!((read.scale("a.q_proj", 4), read.scale("a.v_proj", 4), read.scale("a.q_proj", 8)), (4.0, 1.5, 2.0));
        config["use_rslora"] = json!(true);
        let read = AdapterConfig::parse(&config.to_string()).unwrap();
        assert_eq!((read.scale("a.q_proj", 4), read.scale("a.v_proj", 4)), (8.0, 3.0));
    }

    #[test]
    fn a_target_is_in_the_layers_that_are_transformed_and_not_excluded() {
        let mut config = plain();
        let targets = |config: &Value| {
            let read = AdapterConfig::parse(&config.to_string()).unwrap();
            let paths = ["layers.0.q_proj", "layers.1.v_proj", "layers.1.k_proj"];
            paths.map(|path| read.targets(&format!("model.{path}")))
        };
        assert_eq!(targets(&config), [true, true, false]);
        config["exclude_modules"] = json!(["v_proj"]);
        assert_eq!(targets(&config), [true, false, false]);
        config["exclude_modules"] = Value::Null;
        config["layers_to_transform"] = json!([1]);
        assert_eq!(targets(&config), [false, true, false]);
        config["layers_to_transform"] = json!(0);
        assert_eq!(targets(&config), [true, false, false]);
    }

    #[test]
    fn what_the_engine_does_not_compute_is_refused_by_name() {
        for (field, value) in [
            ("use_dora", json!(true)),
            ("modules_to_save", json!(["norm"])),
            ("init_lora_weights", json!("pissa_niter_4")),
            ("init_lora_weights", json!("lora_ga")),
            ("lora_ga_config", json!({"a": 1})),
            ("corda_config", json!({"a": 1})),
            ("r", json!(0)),
            ("r", json!(2.5)),
            ("lora_alpha", json!("NaN")),
            ("use_rslora", json!("yes")),
            ("layers_to_transform", json!(["a"])),
            ("something_new", json!(0)),
        ] {
            let mut config = plain();
            config[field] = value;
            let error = AdapterConfig::parse(&config.to_string()).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
        for (field, value) in
            [("something_new", json!({})), ("init_lora_weights", json!("gaussian")), ("bias", Value::Null)]
        {
            let mut config = plain();
            config[field] = value;
            AdapterConfig::parse(&config.to_string()).unwrap();
        }
        assert!(AdapterConfig::parse("[]").unwrap_err().to_string().contains("adapter_config.json"));
    }
}
