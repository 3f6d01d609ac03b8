//! Resolves `--model-path` to a directory.

use crate::args::{EngineArgs, LoadFormat};
use crate::weight_memory::WeightMemory;
use crate::{bundled, detect};
use anyhow::{Result, anyhow, bail, ensure};
use clap::Parser;
use pegainfer_hub::{Hub, HubError, Known};
use pegainfer_runtime::Overrides;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub use crate::model_dir::{ModelDir, from_config};

/// Which files are downloaded, and what is refused before.
struct Wanted<'a> {
    overrides: &'a Overrides,
    weights: bool,
    /// Checks the text of config.json and the bytes of the files against the memory for the weights.
    memory: &'a (dyn Fn(&str, u64) -> Result<(), String> + Sync),
    /// See `--hub-ca`.
    hub_ca: Option<&'a Path>,
}

/// Finds the checkpoint. If `--model-path` is a Hugging Face id, it is downloaded, unless its weights do not fit the
/// memory of the devices that the flags choose.
pub fn resolve(args: &EngineArgs) -> Result<ModelDir> {
    let given = with_revision(args.model_path.as_deref(), args.revision.as_deref())?;
    let overrides = args.overrides();
    let memory = |config: &str, bytes| match WeightMemory::chosen(args).map_err(|error| format!("{error:#}"))? {
        Some(memory) => memory.check(config, bytes, &overrides),
        None => Ok(()),
    };
    let weights = args.load_format == LoadFormat::Auto;
    let hub_ca = args.hub_ca.as_deref();
    find(given.as_deref(), &Wanted { overrides: &overrides, weights, memory: &memory, hub_ca })
}

/// Downloads the model with this Hugging Face id, and returns its directory or GGUF file. A model that is too large for
/// this machine may be for another one, and is only warned of.
pub fn pull(id: &str, revision: Option<&str>, hub_ca: Option<&Path>) -> Result<PathBuf> {
    let id = with_revision(Some(id), revision)?.unwrap_or_default();
    ensure!(is_hub_id(&id), "{id} is not a Hugging Face id such as Qwen/Qwen3-0.6B");
    let overrides = Overrides::default();
    let memory = |config: &str, bytes| {
        let here = WeightMemory::chosen(&Defaults::parse_from(["pull"]).engine).ok().flatten();
        if let Some(Err(why)) = here.map(|memory| memory.check(config, bytes, &overrides)) {
            log::warn!("{id} cannot be served on this machine: {why}");
        }
        Ok(())
    };
    Ok(download(&id, &Wanted { overrides: &overrides, weights: true, memory: &memory, hub_ca })?)
}

/// The engine's flags, for their defaults.
#[derive(Parser)]
struct Defaults {
    #[command(flatten)]
    engine: EngineArgs,
}

/// Like [`resolve`], for commands without weights: these are not downloaded.
pub fn resolve_config(model_path: Option<&str>) -> Result<ModelDir> {
    find(model_path, &Wanted { overrides: &Overrides::default(), weights: false, memory: &|_, _| Ok(()), hub_ca: None })
}

fn find(model_path: Option<&str>, wanted: &Wanted<'_>) -> Result<ModelDir> {
    let Some(given) = model_path.filter(|given| !is_bundled(given)) else {
        let files = bundled::write()?;
        let (dir, name) = (files.path().join(bundled::NAME), Some(format!("the bundled {}", bundled::NAME)));
        return Ok(ModelDir { dir, hub_id: None, name, _temporary: Some(files) });
    };
    let dir = PathBuf::from(given);
    if dir.is_dir() || is_gguf(&dir) {
        return Ok(ModelDir { dir, hub_id: None, name: None, _temporary: None });
    }
    if dir.exists() {
        bail!("--model-path {given} is a file: give the directory that holds config.json, or a .gguf file");
    }
    if !is_hub_id(given) {
        bail!(
            "--model-path {given} is neither a directory, a .gguf file nor a Hugging Face id such as Qwen/Qwen3-0.6B"
        );
    }
    let dir = download(given, wanted).map_err(|error| match error {
        // It may also be a misspelt path.
        HubError::NotFound { .. } | HubError::Unreachable { .. } | HubError::Offline { .. } => {
            anyhow!("{error}; and there is no directory {given} here")
        }
        error => error.into(),
    })?;
    Ok(ModelDir { dir, hub_id: Some(given.to_owned()), name: None, _temporary: None })
}

fn download(id: &str, wanted: &Wanted<'_>) -> Result<PathBuf, HubError> {
    let Wanted { overrides, weights, memory, hub_ca } = *wanted;
    let config = OnceLock::new();
    let mut hub = Hub::from_env();
    hub.ca_file = hub_ca.map(Path::to_owned).or(hub.ca_file);
    hub.fetch(id, weights, &|known| match known {
        Known::Config(text) => {
            check(text, overrides)?;
            // GGUF files in several parts have one configuration.
            let _ = config.set(text.to_owned());
            Ok(())
        }
        Known::Bytes(bytes) => memory(config.get().map_or("", String::as_str), bytes),
    })
}

/// The id with the revision of `--revision`.
fn with_revision(model: Option<&str>, revision: Option<&str>) -> Result<Option<String>> {
    let (Some(revision), model) = (revision, model.unwrap_or_default()) else { return Ok(model.map(str::to_owned)) };
    ensure!(
        is_hub_id(model) && !Path::new(model).exists() && !model.contains('@'),
        "--revision {revision} is for a Hugging Face id without one, such as Qwen/Qwen3-0.6B"
    );
    let (repo, quantization) = model.find(':').map_or((model, ""), |at| model.split_at(at));
    Ok(Some(format!("{repo}@{revision}{quantization}")))
}

/// Refuses a text of config.json, with overrides, that no engine serves.
fn check(config: &str, overrides: &Overrides) -> Result<(), String> {
    let family = detect::in_config(config, "config.json".into()).map_err(|error| error.to_string())?;
    (family.check)(config, overrides).map_err(|error| format!("{error:#}"))
}

/// True for the name of the bundled model, unless there is a directory of that name.
fn is_bundled(given: &str) -> bool {
    given == bundled::NAME && !Path::new(given).exists()
}

/// True for a file with the extension of GGUF.
fn is_gguf(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// True if the text is `organisation/name`, in characters that the hub allows, perhaps with a revision and the
/// quantisation of a GGUF file: `organisation/name@REVISION:Q4_K_M`.
fn is_hub_id(text: &str) -> bool {
    let valid = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-', '~'])
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    let (id, quantization) = text.split_once(':').map_or((text, None), |(id, end)| (id, Some(end)));
    let (id, revision) = id.split_once('@').map_or((id, None), |(id, end)| (id, Some(end)));
    [quantization, revision].into_iter().flatten().all(valid)
        && id.split_once('/').is_some_and(|(owner, name)| valid(owner) && valid(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids_are_distinguished_from_paths() {
        for id in
            ["Qwen/Qwen3-0.6B", "a/b", "deepseek-ai/DeepSeek-V4-Flash", "unsloth/Qwen3-8B-GGUF:Q4_K_M", "a/b@v1:Q4"]
        {
            assert!(is_hub_id(id), "{id}");
        }
        for path in [
            "./models/x",
            "/models/x",
            "../x/y",
            "models/x/y",
            "qwen3",
            "~/x",
            "a/b c",
            "a/",
            "/b",
            "a/b:",
            "a/b:c/d",
            "a/b@",
            "a/b@..",
        ] {
            assert!(!is_hub_id(path), "{path}");
        }
    }
}
