//! Which model family a checkpoint belongs to.

use serde_json::Value;
use std::fmt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// A model family that has an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Dense Qwen3, 0.6B to 32B.
    Qwen3,
    /// Dense Qwen3.5, 0.8B to 27B, text only.
    #[cfg(feature = "qwen35")]
    Qwen35,
    /// DeepSeek-V4-Flash.
    #[cfg(feature = "deepseek-v4")]
    DeepSeekV4,
}

/// Every family, with the names that config.json gives it.
const FAMILIES: &[(Family, &str, &str)] = &[
    (Family::Qwen3, "Qwen3ForCausalLM", "qwen3"),
    #[cfg(feature = "qwen35")]
    (Family::Qwen35, "Qwen3_5ForConditionalGeneration", "qwen3_5"),
    #[cfg(feature = "deepseek-v4")]
    (Family::DeepSeekV4, "DeepseekV4ForCausalLM", "deepseek_v4"),
];

impl Family {
    /// Whether its engine runs on a GPU.
    pub fn has_cuda_kernels(self) -> bool {
        match self {
            Self::Qwen3 => true,
            #[cfg(feature = "qwen35")]
            Self::Qwen35 => true,
            #[cfg(feature = "deepseek-v4")]
            Self::DeepSeekV4 => false,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qwen3 => f.write_str("Qwen3"),
            #[cfg(feature = "qwen35")]
            Self::Qwen35 => f.write_str("Qwen3.5"),
            #[cfg(feature = "deepseek-v4")]
            Self::DeepSeekV4 => f.write_str("DeepSeek-V4"),
        }
    }
}

/// Why no engine fits a directory.
#[derive(Debug, Error)]
pub enum DetectError {
    /// Not a checkpoint.
    #[error("{} is missing: {} is not a checkpoint directory", path.display(), path.parent().unwrap_or(path).display())]
    Missing {
        /// Where config.json should be.
        path: PathBuf,
    },
    /// config.json cannot be read or parsed.
    #[error("{} cannot be used: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A valid configuration of a model that has no engine.
    #[error("{} describes {found}, which is not supported; supported are {}", path.display(), supported())]
    Unknown {
        /// The file.
        path: PathBuf,
        /// What it says it is.
        found: String,
    },
}

fn supported() -> String {
    let names =
        FAMILIES.iter().map(|(_, architecture, model_type)| format!("{architecture} (model_type {model_type})"));
    names.collect::<Vec<_>>().join(", ")
}

/// Reads `config.json`: `architectures` decides, `model_type` where there are none.
pub fn detect(dir: &Path) -> Result<Family, DetectError> {
    let path = dir.join("config.json");
    if !path.is_file() {
        return Err(DetectError::Missing { path });
    }
    let malformed = |reason: String| DetectError::Malformed { path: path.clone(), reason };
    let text = std::fs::read_to_string(&path).map_err(|e| malformed(e.to_string()))?;
    let config: Value = serde_json::from_str(&text).map_err(|e| malformed(format!("it is not valid JSON: {e}")))?;
    if !config.is_object() {
        return Err(malformed("it is not a JSON object".into()));
    }
    let architecture = config["architectures"][0].as_str();
    let model_type = config["model_type"].as_str();
    let family = FAMILIES.iter().find(|(_, known_architecture, known_type)| match architecture {
        Some(name) => name == *known_architecture,
        None => model_type == Some(known_type),
    });
    match (family, architecture.or(model_type)) {
        (Some((family, ..)), _) => Ok(*family),
        (None, Some(found)) => Err(DetectError::Unknown { path, found: found.to_string() }),
        (None, None) => Err(malformed("it names neither architectures nor model_type".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{self, TempDir};

    fn detect_config(config: &str) -> Result<Family, String> {
        let dir = TempDir::new("detect");
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        detect(dir.path()).map_err(|e| e.to_string())
    }

    #[test]
    fn families_are_found_by_architecture_or_type() {
        assert_eq!(detect(&testing::model_dir()).unwrap(), Family::Qwen3);
        assert_eq!(detect_config(r#"{"model_type": "qwen3"}"#).unwrap(), Family::Qwen3);
        assert_eq!(detect_config(r#"{"architectures": ["Qwen3ForCausalLM"]}"#).unwrap(), Family::Qwen3);
    }

    #[cfg(feature = "qwen35")]
    #[test]
    fn a_multimodal_checkpoint_is_its_text_model() {
        assert_eq!(detect(&testing::model_dir().with_file_name("qwen35-tiny")).unwrap(), Family::Qwen35);
        assert_eq!(detect_config(r#"{"model_type": "qwen3_5"}"#).unwrap(), Family::Qwen35);
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
