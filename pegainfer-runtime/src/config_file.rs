//! config.json of a checkpoint: reads fields by name and refuses unsupported ones by name.

use super::at_load::AtLoad;
use super::end_of_text;
use super::sizes::max_value;
use pegainfer_core::exec::Activations;
use pegainfer_kernels::ops::{HeadShape, KvDType};
use pegainfer_model_files::{FilesError, ModelFiles};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a checkpoint's configuration cannot be served.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The files of a model in GGUF.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// A file is missing or unreadable.
    #[error("cannot read {}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        error: std::io::Error,
    },
    /// Not JSON, a missing field, or a field of the wrong type or with an impossible value.
    #[error("{} is not a valid {family} configuration: {message}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The model family, as messages call it.
        family: &'static str,
        /// Description of the error.
        message: String,
    },
    /// A valid configuration of something that the model crate does not implement.
    #[error("config.json asks for {field} = {value}, which this engine does not implement; it serves {served}")]
    Unsupported {
        /// The field.
        field: &'static str,
        /// Value of the field.
        value: String,
        /// Supported values, in words.
        served: &'static str,
    },
    /// A flag that does not fit the model.
    #[error("{flag}: {reason}; leave the flag out")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// What the model has or lacks.
        reason: String,
    },
}

/// A field, its only supported value, and that in words. A missing or null field counts as this value.
pub type Served = (&'static str, Value, &'static str);

/// The text of a config.json, and of the generation_config.json next to it.
#[derive(Debug)]
pub struct ConfigFile {
    family: &'static str,
    path: PathBuf,
    root: Value,
    /// Folder or GGUF file of the checkpoint, if there is one.
    model_path: Option<PathBuf>,
    /// Object in which fields are looked up before the root.
    section: Option<&'static str>,
    /// `eos_token_id` of generation_config.json.
    generation_eos: Vec<u32>,
    /// Id of the tokenizer's `eos_token`.
    tokenizer_eos: Option<u32>,
    overrides: Overrides,
}

/// Types of a model, as `dtype` and `torch_dtype` name them.
const DTYPES: [&str; 3] = ["bfloat16", "float16", "float32"];

/// The flag of [`Overrides::router_skew`].
const SKEW: &str = "--dummy-router-skew";

/// Changes of a configuration by the user's flags.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// Format to which bf16 projections are rounded when they are loaded: `--quantization`.
    pub quantization: Option<AtLoad>,
    /// Element format of the KV cache: `--kv-cache-dtype`.
    pub kv_dtype: KvDType,
    /// Takes the place of `rope_scaling`: `--rope-scaling`.
    pub rope_scaling: Option<Value>,
    /// Activations of GEMMs with group-quantised weights: `--exact-activations`, `--fp8-prompts`.
    pub activations: Activations,
    /// True if dummy routers send a third of the tokens to one expert: `--dummy-router-skew`.
    pub router_skew: bool,
    /// True if the layers that draft are loaded (multi-token prediction). Set by [`load`](super::load()) from
    /// `--speculative-config`.
    pub mtp: bool,
    /// True if the image encoder of a model that has one is loaded. The model then reads images.
    pub images: bool,
}

impl ConfigFile {
    /// Reads `config.json` of the model at `path`, a folder or GGUF, and the end-of-text ids of
    /// `generation_config.json` and of the tokenizer, if they exist.
    pub fn read(path: &Path, family: &'static str) -> Result<Self, ConfigError> {
        let files = ModelFiles::open(path)?;
        let name = "config.json";
        let Some(text) = files.read(name)? else {
            return Err(ConfigError::Io { path: files.path(name), error: std::io::ErrorKind::NotFound.into() });
        };
        let mut file = Self::new(files.path(name), &text, family)?;
        file.model_path = Some(path.to_owned());
        let name = "generation_config.json";
        if let Some(text) = files.read(name)? {
            let generation = Self::new(files.path(name), &text, family)?;
            file.generation_eos = generation.token_ids("eos_token_id")?;
        }
        // The metadata of GGUF names no further ends.
        if let ModelFiles::Folder(_) = files {
            file.tokenizer_eos = end_of_text::tokenizer_eos(&files);
        }
        Ok(file)
    }

    /// The text of a config.json without a checkpoint around it.
    pub fn parse(text: &str, family: &'static str) -> Result<Self, ConfigError> {
        Self::new("config.json".into(), text, family)
    }

    fn new(path: PathBuf, text: &str, family: &'static str) -> Result<Self, ConfigError> {
        match serde_json::from_str(text) {
            Ok(root) => Ok(Self {
                family,
                path,
                root,
                model_path: None,
                section: None,
                generation_eos: Vec::new(),
                tokenizer_eos: None,
                overrides: Overrides::default(),
            }),
            Err(error) => Err(ConfigError::Invalid { path, family, message: error.to_string() }),
        }
    }

    /// This file with the changes of the user's flags.
    pub fn with(self, overrides: Overrides) -> Self {
        Self { overrides, ..self }
    }

    /// Folder or GGUF file of the checkpoint; `None` if the text came without a file.
    pub(super) fn model_path(&self) -> Option<&Path> {
        self.model_path.as_deref()
    }

    /// The object in another file of the checkpoint; `None` if there is no such file.
    pub(super) fn neighbour(&self, name: &str) -> Result<Option<Value>, ConfigError> {
        let Some(files) = self.model_path().map(ModelFiles::open).transpose()? else { return Ok(None) };
        let Some(text) = files.read(name)? else { return Ok(None) };
        Self::new(files.path(name), &text, self.family).map(|file| Some(file.root).filter(Value::is_object))
    }

    /// True if dummy routers send a third of the tokens to one expert. The error says that a model without experts has
    /// no routers.
    pub(super) fn skews_routers(&self, has_experts: bool) -> Result<bool, ConfigError> {
        if self.overrides.router_skew && !has_experts {
            return Err(ConfigError::Flag { flag: SKEW, reason: "the model has no experts".to_owned() });
        }
        Ok(self.overrides.router_skew)
    }

    /// True if the user wants the layers that draft.
    pub fn drafts_by_model(&self) -> bool {
        self.overrides.mtp
    }

    /// True if the user wants the image encoder.
    pub fn reads_images(&self) -> bool {
        self.overrides.images
    }

    /// The fields of the file as a type.
    pub fn fields<'a, T: Deserialize<'a>>(&'a self) -> Result<T, ConfigError> {
        T::deserialize(&self.root).map_err(|error| self.invalid(error.to_string()))
    }

    /// Refuses flags that change the configuration of other models.
    pub fn refuse_overrides(&self) -> Result<(), ConfigError> {
        let Overrides { quantization, kv_dtype, rope_scaling, router_skew, activations: _, mtp: _, images: _ } =
            &self.overrides;
        let fixed = "takes the formats and positions of its checkpoint";
        let flags = [
            ("--quantization", fixed, quantization.is_some()),
            ("--kv-cache-dtype", fixed, *kv_dtype != KvDType::default()),
            ("--rope-scaling", fixed, rope_scaling.is_some()),
            (SKEW, "has only dummy routers that choose evenly", *router_skew),
        ];
        match flags.into_iter().find(|(.., given)| *given) {
            Some((flag, why, _)) => Err(ConfigError::Flag { flag, reason: format!("{} {why}", self.family) }),
            None => Ok(()),
        }
    }

    /// Format to which the user wants bf16 weights rounded.
    pub(super) fn quantize_at_load(&self) -> Option<AtLoad> {
        self.overrides.quantization
    }

    /// Element format of the KV cache.
    pub fn kv_dtype(&self) -> KvDType {
        self.overrides.kv_dtype
    }

    /// Replacement of `rope_scaling`, if given.
    pub(super) fn rope_scaling_flag(&self) -> Option<&Value> {
        self.overrides.rope_scaling.as_ref()
    }

    /// Looks fields up in the object `section` first, if there is one: the text part of a multimodal model.
    pub fn with_section(self, section: &'static str) -> Self {
        Self { section: self.root[section].is_object().then_some(section), ..self }
    }

    /// Value of `field`, a name or a path with dots; null if it is missing.
    pub fn get(&self, field: &str) -> &Value {
        let look_up = |object| field.split('.').fold(object, |value: &Value, name| &value[name]);
        match self.section.map(|section| look_up(&self.root[section])) {
            Some(value) if !value.is_null() => value,
            _ => look_up(&self.root),
        }
    }

    /// True if the file has `field`, even as null.
    pub fn has(&self, field: &str) -> bool {
        let section = self.section.and_then(|section| self.root[section].get(field));
        section.or(self.root.get(field)).is_some()
    }

    /// A count, from 1 to the bound in [`max_value`].
    pub fn size(&self, field: &str) -> Result<usize, ConfigError> {
        let (value, max_value) = (self.required(field)?, max_value(field));
        let size = value.as_u64().filter(|size| (1..=max_value as u64).contains(size));
        let wrong = || self.invalid(format!("{field} is {value}, and must be an integer from 1 to {max_value}"));
        size.map(|size| size as usize).ok_or_else(wrong)
    }

    /// Variant of [`size`](Self::size) with a `default` for a missing field.
    pub fn size_or(&self, field: &str, default: usize) -> Result<usize, ConfigError> {
        if self.get(field).is_null() { Ok(default) } else { self.size(field) }
    }

    /// A number above 0.
    pub fn positive(&self, field: &str) -> Result<f64, ConfigError> {
        let value = self.required(field)?;
        let number = value.as_f64().filter(|number| *number > 0.0);
        number.ok_or_else(|| self.invalid(format!("{field} is {value}, and must be a positive number")))
    }

    /// A boolean; false if the field is missing.
    pub fn flag(&self, field: &str) -> Result<bool, ConfigError> {
        match self.get(field) {
            Value::Null => Ok(false),
            value => value.as_bool().ok_or_else(|| self.invalid(format!("{field} is {value}, and must be a boolean"))),
        }
    }

    /// Heads of full attention, of a size that the attention kernels support; `head_dim` is the default of that field.
    pub fn heads(&self, head_dim: usize) -> Result<HeadShape, ConfigError> {
        let (heads, kv_heads) = (self.size("num_attention_heads")?, self.size("num_key_value_heads")?);
        let shape = HeadShape { heads, kv_heads, head_dim: self.size_or("head_dim", head_dim)? };
        if !heads.is_multiple_of(kv_heads) {
            return Err(self.invalid("num_attention_heads is not a multiple of num_key_value_heads"));
        }
        if !shape.is_supported() {
            return Err(unsupported("head_dim", shape.head_dim, "multiples of 16 from 32 to 256"));
        }
        Ok(shape)
    }

    /// Standard deviation of dummy weights.
    pub fn initializer_range(&self) -> f32 {
        self.get("initializer_range").as_f64().unwrap_or(0.02) as f32
    }

    /// Refuses dtypes other than floating-point ones, which are rounded to bf16 at load.
    pub fn check_dtype(&self) -> Result<(), ConfigError> {
        for field in ["dtype", "torch_dtype"] {
            let value = self.get(field);
            if !value.is_null() && !value.as_str().is_some_and(|dtype| DTYPES.contains(&dtype)) {
                return Err(unsupported(field, text(value), "bfloat16, and float16 and float32 rounded to bfloat16"));
            }
        }
        Ok(())
    }

    /// End-of-text ids of all files of the checkpoint, see [`end_of_text::union`].
    pub fn eos_token_ids(&self) -> Result<Vec<u32>, ConfigError> {
        let mut config = self.token_ids("eos_token_id")?;
        // A multimodal model may name more ids outside of its text part.
        config.extend(self.ids_of("eos_token_id", &self.root["eos_token_id"])?);
        let mut seen = HashSet::new();
        config.retain(|id| seen.insert(*id));
        Ok(end_of_text::union(self.generation_eos.clone(), config, self.tokenizer_eos, self.size("vocab_size")?))
    }

    /// An id or a list of ids; none if the field is missing.
    pub fn token_ids(&self, field: &str) -> Result<Vec<u32>, ConfigError> {
        self.ids_of(field, self.get(field))
    }

    fn ids_of(&self, field: &str, value: &Value) -> Result<Vec<u32>, ConfigError> {
        let one = |value: &Value| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| self.invalid(format!("{field} {value} is not a token id")))
        };
        match value {
            Value::Null => Ok(Vec::new()),
            Value::Array(ids) => ids.iter().map(one).collect(),
            id => Ok(vec![one(id)?]),
        }
    }

    /// Refuses the first of these fields that has another value than the served one.
    pub fn require_served(&self, fields: impl IntoIterator<Item = Served>) -> Result<(), ConfigError> {
        for (field, served, words) in fields {
            let value = self.get(field);
            if !value.is_null() && *value != served {
                return Err(unsupported(field, text(value), words));
            }
        }
        Ok(())
    }

    /// The error that the file makes no sense.
    pub fn invalid(&self, message: impl Into<String>) -> ConfigError {
        ConfigError::Invalid { path: self.path.clone(), family: self.family, message: message.into() }
    }

    fn required(&self, field: &str) -> Result<&Value, ConfigError> {
        let value = self.get(field);
        if value.is_null() { Err(self.invalid(format!("{field} is missing"))) } else { Ok(value) }
    }
}

/// A JSON value as a message shows it.
pub(super) fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Error for an unsupported `value` of `field`; `served` lists the supported ones in words.
pub fn unsupported(field: &'static str, value: impl ToString, served: &'static str) -> ConfigError {
    ConfigError::Unsupported { field, value: value.to_string(), served }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn file(json: &Value) -> ConfigFile {
        ConfigFile::parse(&json.to_string(), "Test").unwrap()
    }

    #[test]
    fn fields_are_looked_up_in_the_section_first() {
        let json = json!({"text": {"layers": 2, "rope": {"theta": 5.0}}, "layers": 9, "tied": true});
        let (whole, text) = (file(&json), file(&json).with_section("text"));
        assert_eq!((whole.size("layers").unwrap(), text.size("layers").unwrap()), (9, 2));
        assert!(text.flag("tied").unwrap() && !text.flag("other").unwrap());
        assert_eq!(text.positive("rope.theta").unwrap(), 5.0);
        assert_eq!(file(&json).with_section("vision").size("layers").unwrap(), 9);
    }

    #[test]
    fn an_error_names_the_file_the_family_and_the_field() {
        let file = file(&json!({"zero": 0, "large": 1u64 << 32, "text": "x", "eos_token_id": [1, -1], "vocab_size": 9,
            "num_hidden_layers": 1_000_000_000, "num_attention_heads": 1 << 15, "max_position_embeddings": 1u64 << 27}));
        let bounded = ["num_hidden_layers", "num_attention_heads", "max_position_embeddings"];
        for field in ["zero", "large", "text", "absent"].into_iter().chain(bounded) {
            let error = file.size(field).unwrap_err().to_string();
            assert!(error.starts_with("config.json is not a valid Test configuration") && error.contains(field));
        }
        assert!(file.positive("zero").is_err() && file.flag("text").is_err());
        assert!(file.eos_token_ids().unwrap_err().to_string().contains("eos_token_id -1 is not a token id"));
        assert!(ConfigFile::parse("{", "Test").unwrap_err().to_string().contains("config.json"));
        let error = ConfigFile::read(Path::new("/nowhere"), "Test").unwrap_err().to_string();
        assert!(error.starts_with("cannot read /nowhere/config.json"), "{error}");
    }

    #[test]
    fn only_the_served_value_passes() {
        let served = || [("act", json!("silu"), "silu"), ("quantization.method", Value::Null, "bf16 weights")];
        file(&json!({"act": "silu"})).require_served(served()).unwrap();
        file(&json!({"act": null})).require_served(served()).unwrap();
        let error = file(&json!({"act": "gelu"})).require_served(served()).unwrap_err().to_string();
        assert!(error.contains("act = gelu") && error.contains("serves silu"), "{error}");
        assert!(file(&json!({"quantization": {"method": "fp8"}})).require_served(served()).is_err());
    }
}
