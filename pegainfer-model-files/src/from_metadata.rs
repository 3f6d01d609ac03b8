//! A Hugging Face folder's files as the metadata of a GGUF file says them.

mod architecture;
mod config;
mod generation;
mod tokenizer;

pub use architecture::{Weight, check_architecture, weight};

use crate::error::FilesError;
use crate::gguf::Gguf;
use architecture::Architecture;
use serde_json::Value;

/// The file `name` of a folder with the same model; `None` for files that the metadata does not stand for.
pub(crate) fn file(gguf: &Gguf, name: &str) -> Result<Option<String>, FilesError> {
    let architecture = Architecture::of(gguf)?;
    let json = |value: Result<Value, String>| {
        let value = value.map_err(|message| FilesError::unsupported(&gguf.files[0], message))?;
        Ok(Some(value.to_string()))
    };
    match name {
        "config.json" => json(config::config(gguf, architecture)),
        "generation_config.json" => json(generation::generation_config(&gguf.metadata)),
        "tokenizer.json" => json(tokenizer::tokenizer(&gguf.metadata)),
        "tokenizer_config.json" => json(tokenizer::tokenizer_config(&gguf.metadata)),
        _ => Ok(None),
    }
}

/// Checks, from the headers, that every weight of a served architecture has a type that is served.
pub(crate) fn check(gguf: &Gguf) -> Result<(), FilesError> {
    let architecture = Architecture::of(gguf)?;
    let refused = gguf
        .tensors
        .iter()
        .map(|tensor| &tensor.info)
        .find(|info| !info.kind.is_served() && architecture.weight_name(&gguf.metadata, &info.name).is_some());
    match refused {
        None => Ok(()),
        Some(info) => {
            let served: Vec<String> = crate::gguf::SERVED.iter().map(ToString::to_string).collect();
            let message =
                format!("{} has type {}, and weights in {} are served", info.name, info.kind, served.join(", "));
            Err(FilesError::unsupported(&gguf.files[0], message))
        }
    }
}
