//! Flags for LoRA adapters.

use crate::adapters::Adapters;
use crate::api::adapters::warn_if_unchanged;
use anyhow::{Context, Result, ensure};
use clap::Args;
use pegainfer_core::engine::EngineHandle;
use pegainfer_runtime::AdapterLoader;
use pegainfer_terminal::values::parse_name;
use serde::Deserialize;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

/// Default of `--max-cpu-loras`.
const MAX_IN_MEMORY: usize = 64;

/// Flags for LoRA adapters.
#[derive(Debug, Clone, Args)]
pub struct LoraArgs {
    /// LoRA adapter that requests name as their model, such as sql=/adapters/sql, or as vLLM's JSON with name and path;
    /// repeatable
    #[arg(long, value_name = "NAME=DIR", value_parser = parse_module, requires = "enable_lora")]
    pub lora_modules: Vec<Module>,
    /// Let admins load adapters from this folder with POST /v1/load_lora_adapter
    #[arg(long, value_name = "DIR", requires = "enable_lora")]
    pub lora_root: Option<PathBuf>,
    /// Maximum number of adapters in the computer's memory; others are read again when a request names them [default:
    /// 64]
    #[arg(long, value_name = "N", requires = "enable_lora")]
    pub max_cpu_loras: Option<NonZeroUsize>,
}

/// A name and the folder of its adapter.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Module {
    /// The name.
    pub name: String,
    /// The folder.
    pub path: PathBuf,
}

/// Parses `NAME=DIR`, or a JSON object with `name`, `path` and, not used, `base_model_name`.
pub fn parse_module(text: &str) -> Result<Module, String> {
    let module = match text.split_once('=') {
        _ if text.trim_start().starts_with('{') => {
            serde_json::from_str(text).map_err(|error| format!("it is no object with name and path: {error}"))?
        }
        Some((name, path)) if !path.is_empty() => Module { name: name.to_owned(), path: path.into() },
        _ => return Err(format!("{text:?} is not a name and a folder, such as sql=/adapters/sql")),
    };
    parse_name(&module.name)?;
    Ok(module)
}

impl LoraArgs {
    /// The server's adapters, still without names; `None` if they are not enabled. `own`: names of the model itself.
    pub(super) fn adapters<'a>(
        &self,
        loader: Option<AdapterLoader>,
        max_loras: usize,
        own: impl Iterator<Item = &'a String>,
    ) -> Result<Option<Arc<Adapters>>> {
        let Some(loader) = loader else { return Ok(None) };
        if let Some(root) = &self.lora_root {
            ensure!(root.is_dir(), "--lora-root {} is no folder", root.display());
        }
        let mut taken: Vec<&String> = own.collect();
        for Module { name, .. } in &self.lora_modules {
            ensure!(!taken.contains(&name), "--lora-modules: the name {name} is taken");
            taken.push(name);
        }
        let max_in_memory = self.max_cpu_loras.map_or(MAX_IN_MEMORY, Into::into);
        Ok(Some(Arc::new(Adapters::new(loader, max_loras, max_in_memory, self.lora_root.clone()))))
    }

    /// Loads the adapters of `--lora-modules`.
    pub(super) async fn load_modules(&self, adapters: &Adapters, engine: &EngineHandle) -> Result<()> {
        for Module { name, path } in &self.lora_modules {
            let loaded = adapters.load(name, path);
            let adapter =
                loaded.with_context(|| format!("--lora-modules {name}={} cannot be loaded", path.display()))?;
            warn_if_unchanged(engine, name, &adapter).await;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_a_name_and_a_folder() {
        let module = |text| parse_module(text).map(|module| (module.name, module.path));
        let sql = ("sql".to_owned(), PathBuf::from("/a/sql=1"));
        assert_eq!(module("sql=/a/sql=1"), Ok(sql.clone()));
        assert_eq!(module(r#"{"name": "sql", "path": "/a/sql=1", "base_model_name": "m"}"#), Ok(sql));
        for bad in ["sql", "sql=", "=/a", r#"{"name": "sql"}"#, "a\nb=/a"] {
            assert!(parse_module(bad).is_err(), "{bad}");
        }
    }
}
