//! Detects the model family of a checkpoint.

use crate::engine::family::Family;
use pegainfer_model_files::{FilesError, ModelFiles};
use serde_json::Value;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Every family.
static FAMILIES: &[Family] = &[
    Family::new::<pegainfer_qwen3_4b::Qwen3>(),
    #[cfg(feature = "qwen35")]
    Family::new::<pegainfer_qwen35_4b::Qwen35>(),
    #[cfg(feature = "deepseek-v4")]
    crate::engine::deepseek_v4::FAMILY,
];

/// Why a directory has no engine.
#[derive(Debug, Error)]
pub enum DetectError {
    /// The directory is not a checkpoint.
    #[error("{} is missing: {} is not a checkpoint directory", path.display(), path.parent().unwrap_or(path).display())]
    Missing {
        /// Expected path of config.json.
        path: PathBuf,
    },
    /// The files of a model in GGUF.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// config.json cannot be read or parsed.
    #[error("{} cannot be used: {reason}", path.display())]
    Malformed {
        /// Path of config.json.
        path: PathBuf,
        /// Why the file is invalid.
        reason: String,
    },
    /// config.json is valid, but its model has no engine.
    #[error("{} describes {found}, which is not supported; supported are {}", path.display(), supported())]
    Unknown {
        /// Path of config.json.
        path: PathBuf,
        /// The architecture in config.json.
        found: String,
    },
}

impl DetectError {
    /// The problem, without the path of the file.
    pub fn reason(&self) -> String {
        match self {
            Self::Files(error) => error.to_string(),
            Self::Missing { .. } => "its config.json is missing".to_owned(),
            Self::Malformed { reason, .. } => format!("its config.json cannot be used: {reason}"),
            Self::Unknown { found, .. } => format!("{found} is not supported"),
        }
    }
}

fn supported() -> String {
    let names = FAMILIES.iter().flat_map(|family| family.architectures);
    let names = names.map(|(architecture, model_type)| format!("{architecture} (model_type {model_type})"));
    names.collect::<Vec<_>>().join(", ")
}

/// Detects the family of the model at `path`, a folder or GGUF, from config.json: by `architectures`, or by `model_type`
/// if there are none.
pub fn detect(path: &Path) -> Result<&'static Family, DetectError> {
    let (files, name) = (ModelFiles::open(path)?, "config.json");
    let path = files.path(name);
    let malformed = |reason: String| DetectError::Malformed { path: path.clone(), reason };
    let text = files.read(name).map_err(|error| malformed(error.to_string()))?;
    let Some(text) = text else { return Err(DetectError::Missing { path }) };
    in_config(&text, path)
}

/// Detects the family of the model with this text of config.json. `path` is named in errors.
pub fn in_config(text: &str, path: PathBuf) -> Result<&'static Family, DetectError> {
    let malformed = |reason: String| DetectError::Malformed { path: path.clone(), reason };
    let config: Value = serde_json::from_str(text).map_err(|e| malformed(format!("it is not valid JSON: {e}")))?;
    if !config.is_object() {
        return Err(malformed("it is not a JSON object".into()));
    }
    let architecture = config["architectures"][0].as_str();
    let model_type = config["model_type"].as_str();
    let is_named = |(name, kind): &(&str, &str)| match architecture {
        Some(architecture) => architecture == *name,
        None => model_type == Some(*kind),
    };
    let family = FAMILIES.iter().find(|family| family.architectures.iter().any(is_named));
    match (family, architecture.or(model_type)) {
        (Some(family), _) => Ok(family),
        (None, Some(found)) => Err(DetectError::Unknown { path, found: found.to_string() }),
        (None, None) => Err(malformed("it names neither architectures nor model_type".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::{self as testing, TempDir};

    fn detect_config(config: &str) -> Result<&'static str, String> {
        let dir = TempDir::new("detect");
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        detect(dir.path()).map(|family| family.name).map_err(|e| e.to_string())
    }

    #[test]
    fn families_are_found_by_architecture_or_type() {
        assert_eq!(detect(&testing::model_dir()).unwrap().name, "Qwen3");
        assert_eq!(detect_config(r#"{"model_type": "qwen3"}"#).unwrap(), "Qwen3");
        assert_eq!(detect_config(r#"{"architectures": ["Qwen3ForCausalLM"]}"#).unwrap(), "Qwen3");
    }

    #[cfg(feature = "qwen35")]
    #[test]
    fn a_multimodal_checkpoint_is_its_text_model() {
        assert_eq!(detect(&testing::model_dir().with_file_name("qwen35-tiny")).unwrap().name, "Qwen3.5");
        assert_eq!(detect_config(r#"{"model_type": "qwen3_5"}"#).unwrap(), "Qwen3.5");
    }

    #[test]
    fn every_refusal_is_one_clear_sentence() {
        let llama = detect_config(r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}"#).unwrap_err();
        let expected =
            "describes LlamaForCausalLM, which is not supported; supported are Qwen3ForCausalLM (model_type qwen3)";
        assert!(llama.contains(expected), "{llama}");
        assert!(detect_config("{").unwrap_err().contains("it is not valid JSON"));
        assert!(detect_config("[]").unwrap_err().contains("it is not a JSON object"));
        assert!(detect_config("{}").unwrap_err().contains("names neither architectures nor model_type"));
        let missing = detect(Path::new("/nowhere")).unwrap_err().to_string();
        assert_eq!(missing, "/nowhere/config.json is missing: /nowhere is not a checkpoint directory");
    }
}
