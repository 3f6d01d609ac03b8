//! The tensors of an adapter: names and shapes are checked before values are read.

use super::config::{AdapterConfig, layer};
use super::error::AdapterError;
use super::module::{ModelModules, is_nested};
use half::bf16;
use pegainfer_core::weights::{Checkpoint, StoredDtype};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Prefix of all names, of PEFT's wrappers around the model.
const PREFIX: &str = "base_model.model.";

/// Types of stored values.
const DTYPES: [StoredDtype; 3] = [StoredDtype::BF16, StoredDtype::F16, StoredDtype::F32];

/// The two matrices of a module, in bf16.
#[derive(Debug)]
pub struct Factors {
    /// Rows of `a`.
    pub rank: usize,
    /// `[rank, columns of the module]`.
    pub a: Vec<bf16>,
    /// `[rows of the module, rank]`, times the adapter's factor.
    pub b: Vec<bf16>,
}

/// An adapter as it is stored.
#[derive(Debug)]
pub struct AdapterFile {
    /// Matrices by the path of their module in the model's checkpoint.
    pub modules: BTreeMap<String, Factors>,
    /// Number of tensors of parts that the engine does not have, and what those are.
    pub skipped: Option<(usize, &'static str)>,
}

/// Limits of an engine.
#[derive(Debug)]
pub(super) struct Accepted<'a> {
    pub modules: &'a ModelModules,
    pub max_rank: usize,
    /// What a weight of the checkpoint is for, if the engine does not have it.
    pub skipped: fn(&str) -> Option<&'static str>,
}

/// The stored matrices of a module; names of tensors.
#[derive(Debug, Default)]
struct Stored {
    /// Path of the module in the adapter.
    own: String,
    a: Option<String>,
    b: Option<String>,
}

/// A module's matrices with checked shapes.
struct Checked<'a> {
    module: &'a str,
    own: &'a str,
    a: &'a str,
    b: &'a str,
    shape: [usize; 2],
    rank: usize,
}

impl AdapterFile {
    /// Reads the adapter in the folder `path`, or the file in safetensors of this path with its configuration beside it.
    pub fn read(path: &Path, accepted: &Accepted<'_>) -> Result<Self, AdapterError> {
        let (dir, weights) = match path.extension().is_some_and(|extension| extension == "safetensors") {
            true => (path.parent().unwrap_or(Path::new("")), path.to_owned()),
            false => (path, path.join("adapter_model.safetensors")),
        };
        let config = AdapterConfig::read(dir)?;
        let checkpoint = open(&weights)?;
        let (stored, skipped) = sort(&checkpoint, accepted)?;
        check_complete(&config, &stored, accepted)?;
        let checked = stored.iter().map(|(module, stored)| check(&config, &checkpoint, module, stored, accepted));
        // All before the first value is read.
        let checked = checked.collect::<Result<Vec<_>, _>>()?;
        let modules = checked.iter().map(|module| Ok((module.module.to_owned(), read(&config, &checkpoint, module)?)));
        Ok(Self { modules: modules.collect::<Result<_, AdapterError>>()?, skipped })
    }
}

fn open(weights: &Path) -> Result<Checkpoint, AdapterError> {
    if !weights.is_file() {
        return Err(AdapterError::NoWeights { path: PathBuf::from(weights) });
    }
    Ok(Checkpoint::open_file(weights)?)
}

/// The stored matrices by module, and the tensors that the engine has no use for. Refuses all other tensors.
#[expect(clippy::type_complexity, reason = "two results of one loop")]
fn sort(
    checkpoint: &Checkpoint,
    accepted: &Accepted<'_>,
) -> Result<(BTreeMap<String, Stored>, Option<(usize, &'static str)>), AdapterError> {
    let (mut modules, mut skipped) = (BTreeMap::<String, Stored>::new(), None);
    let mut names: Vec<&str> = checkpoint.names().collect();
    names.sort_unstable();
    for name in names {
        let Some((own, is_b)) = matrix(name) else {
            return Err(AdapterError::tensor(name, "is neither a lora_A nor a lora_B of a linear layer"));
        };
        let Some((module, _)) = accepted.modules.find(own) else {
            let Some(purpose) = (accepted.skipped)(own) else {
                return Err(AdapterError::tensor(name, "belongs to no matrix of this model that adapters may change"));
            };
            skipped = Some((skipped.map_or(0, |(tensors, _)| tensors) + 1, purpose));
            continue;
        };
        let stored = modules.entry(module.to_owned()).or_default();
        own.clone_into(&mut stored.own);
        let matrix = if is_b { &mut stored.b } else { &mut stored.a };
        if let Some(other) = matrix.replace(name.to_owned()) {
            return Err(AdapterError::tensor(name, format!("is for the same matrix as {other}")));
        }
    }
    Ok((modules, skipped))
}

/// Path of the module of a tensor, and true for its `lora_B`. Some writers keep the adapter's name before `weight`.
fn matrix(name: &str) -> Option<(&str, bool)> {
    let rest = name.strip_prefix(PREFIX)?.strip_suffix(".weight")?;
    [(".lora_A", false), (".lora_B", true)].into_iter().find_map(|(infix, is_b)| {
        let (path, adapter) = rest.rsplit_once(infix)?;
        let is_name = |adapter: &str| adapter.strip_prefix('.').is_some_and(|name| !name.contains('.'));
        (adapter.is_empty() || is_name(adapter)).then_some((path, is_b))
    })
}

/// Every module that the configuration targets must be there: one without matrices would be served unchanged. Old
/// configurations do not list layers; then only layers with some matrices must have all.
fn check_complete(
    config: &AdapterConfig,
    stored: &BTreeMap<String, Stored>,
    accepted: &Accepted<'_>,
) -> Result<(), AdapterError> {
    let nested = stored.values().any(|stored| is_nested(&stored.own));
    let mut names = accepted.modules.names(nested);
    let present: BTreeSet<_> = stored.keys().map(|module| layer(module)).collect();
    let missing = names.find(|(module, own)| {
        let expected = config.lists_layers() || present.contains(&layer(module));
        expected && config.targets(own) && !stored.contains_key(*module)
    });
    if let Some((_, own)) = missing {
        let message = format!("names {own}, but adapter_model.safetensors has no matrices for it");
        return Err(AdapterError::field("target_modules", message));
    }
    if stored.is_empty() {
        return Err(AdapterError::field(
            "target_modules",
            "names nothing, and adapter_model.safetensors has no tensors",
        ));
    }
    Ok(())
}

/// Checks dtypes, shapes and rank of a module's matrices.
fn check<'a>(
    config: &AdapterConfig,
    checkpoint: &Checkpoint,
    module: &'a str,
    stored: &'a Stored,
    accepted: &Accepted<'_>,
) -> Result<Checked<'a>, AdapterError> {
    let Stored { own, a, b } = stored;
    let missing = |matrix: &str| AdapterError::tensor(&format!("{PREFIX}{own}.{matrix}.weight"), "is missing");
    let (a, b) = (a.as_deref().ok_or_else(|| missing("lora_A"))?, b.as_deref().ok_or_else(|| missing("lora_B"))?);
    let Some((_, shape)) = accepted.modules.find(own) else { return Err(missing("lora_A")) };
    let dims = |name: &str| checkpoint.describe(name).map_or(Vec::new(), |(_, shape)| shape.to_vec());
    for name in [a, b] {
        let dtype = checkpoint.describe(name).map(|(dtype, _)| dtype);
        if !dtype.is_some_and(|dtype| DTYPES.contains(&dtype)) {
            let message =
                format!("is {}, and must be BF16, F16 or F32", dtype.map_or_else(String::new, |it| format!("{it:?}")));
            return Err(AdapterError::tensor(name, message));
        }
    }
    let rank = match dims(a)[..] {
        [rank, columns] if rank > 0 && columns == shape[1] => rank,
        ref other => {
            return Err(AdapterError::tensor(a, format!("is {other:?}, and must be [rank, {}]", shape[1])));
        }
    };
    if dims(b) != [shape[0], rank] {
        return Err(AdapterError::tensor(b, format!("is {:?}, and must be [{}, {rank}]", dims(b), shape[0])));
    }
    if rank > accepted.max_rank {
        let message = format!("has rank {rank}; --max-lora-rank is {}", accepted.max_rank);
        return Err(AdapterError::tensor(a, message));
    }
    if config.rank(own) != rank {
        let message =
            format!("has rank {rank}, but r and rank_pattern of adapter_config.json say {}", config.rank(own));
        return Err(AdapterError::tensor(a, message));
    }
    Ok(Checked { module, own, a, b, shape, rank })
}

/// Reads the values of a module's matrices.
fn read(config: &AdapterConfig, checkpoint: &Checkpoint, module: &Checked<'_>) -> Result<Factors, AdapterError> {
    let Checked { own, a, b, shape: [rows, columns], rank, .. } = *module;
    let values = |name: &str, shape: &[usize], factor: f32| {
        let values = checkpoint.widened(name, shape)?.into_iter().map(|value| bf16::from_f32(value * factor));
        let values: Vec<bf16> = values.collect();
        if values.iter().all(|value| value.is_finite()) {
            return Ok(values);
        }
        Err(AdapterError::tensor(name, "has NaN or infinite values, or values beyond bf16 after the adapter's factor"))
    };
    Ok(Factors { rank, a: values(a, &[rank, columns], 1.0)?, b: values(b, &[rows, rank], config.scale(own, rank))? })
}
