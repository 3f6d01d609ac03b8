//! Quantised weights of a dense model: their description in config.json, and loading of projections.
//!
//! The tensors of a checkpoint decide how each module is stored, because files mix formats and config.json is known to
//! contradict them. config.json tells what tensors do not (zero points), refuses what is not served before anything is
//! loaded, and gives the formats of dummy weights and of plans without a checkpoint.

mod compressed;
mod config;
mod description;
#[cfg(test)]
mod file_tests;
mod modelopt;
mod rules;
#[cfg(test)]
mod tests;

use super::at_load::AtLoad;
use super::config_file::{ConfigError, ConfigFile};
use super::output_matrix::HEAD;
use description::note_act_order;
use pegainfer_core::weights::grouped::{GroupFormat, StoredFormat, ZeroPoints};
use pegainfer_core::weights::{Checkpoint, Columns, Loader, SourceTensor, WeightsError};
use pegainfer_kernels::cpu::weights::BLOCK;
use pegainfer_kernels::ops::{self, Matrix};
use rules::{Rules, Scheme};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A model with quantised weights: `quantization_config`, or the wish to round bf16 weights when they are loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantization {
    /// Formats by the names of modules.
    rules: Rules,
    /// Formats of the tensors next to config.json by the names of weights, without those in bf16; `None` without a
    /// checkpoint.
    stored: Option<Arc<BTreeMap<String, StoredFormat>>>,
    /// Zero points of AWQ and GPTQ tensors.
    zeros: ZeroPoints,
    /// Format to which bf16 weights of the checkpoint are rounded.
    at_load: Option<AtLoad>,
}

impl ConfigFile {
    /// The quantised weights described by `quantization_config`, stored in the checkpoint, or requested by the user;
    /// `None` for bf16 weights. `never`: modules that the family's checkpoints keep in bf16.
    pub fn quantization(&self, never: &[&str]) -> Result<Option<Quantization>, ConfigError> {
        let described = config::read(self, never)?;
        let zeros = described.as_ref().map_or(ZeroPoints::default(), |described| described.zeros);
        let stored = self
            .model_path()
            .and_then(|path| Checkpoint::open(path).ok())
            .map(|checkpoint| formats(&checkpoint, zeros));
        stored.iter().for_each(note_act_order);
        let in_groups = |format: &StoredFormat| *format != StoredFormat::Fp8;
        let is_stored = stored.as_ref().is_some_and(|stored| stored.values().any(in_groups));
        let at_load = self.quantize_at_load();
        Ok(match described {
            None if at_load.is_none() && !is_stored => None,
            None => {
                // Weights that no file describes are bf16.
                let stored = stored.unwrap_or_default();
                Some(Quantization { rules: Rules::fp8(never), stored: Some(Arc::new(stored)), zeros, at_load })
            }
            Some(described) => {
                Some(Quantization { rules: described.rules, stored: stored.map(Arc::new), zeros, at_load })
            }
        })
    }
}

/// The formats of all weights that are not bf16. A weight whose tensors do not fit each other is refused when it is
/// loaded.
fn formats(checkpoint: &Checkpoint, zeros: ZeroPoints) -> BTreeMap<String, StoredFormat> {
    const CODES: [&str; 3] = [".weight", ".qweight", ".weight_packed"];
    let module = |name: &str| CODES.iter().find_map(|suffix| name.strip_suffix(suffix)).map(str::to_owned);
    let weights = checkpoint.names().filter_map(module).map(|module| format!("{module}.weight"));
    let format = |name: &str| checkpoint.format(name, zeros).ok().filter(|format| *format != StoredFormat::Bf16);
    weights.filter_map(|name| format(&name).map(|format| (name, format))).collect()
}

impl Quantization {
    /// All projections in FP8, rounded at load, except those of modules with these names.
    pub fn every(never: &[&str]) -> Self {
        Self { rules: Rules::fp8(never), stored: None, zeros: ZeroPoints::default(), at_load: Some(AtLoad::Fp8) }
    }

    /// All projections, and a separate output matrix, in groups of this format.
    pub fn groups(format: GroupFormat) -> Self {
        Self { rules: Rules::groups(format), stored: None, zeros: ZeroPoints::default(), at_load: None }
    }

    /// True if there may be FP8 weights with a scale for each block of 128 x 128, which ranks share in whole blocks.
    pub fn has_blocks(&self) -> bool {
        self.at_load == Some(AtLoad::Fp8)
            || match &self.stored {
                Some(stored) => stored.values().any(|format| *format == StoredFormat::Fp8),
                None => self.rules.any(Scheme::Fp8),
            }
    }

    /// Format of the projection weight `name` (`X.weight`) with rows of `k` columns: as the checkpoint next to
    /// config.json stores it, or as config.json describes it.
    fn format(&self, name: &str, k: usize) -> StoredFormat {
        match &self.stored {
            Some(stored) => stored.get(name).copied().unwrap_or(StoredFormat::Bf16),
            None => self.rules.scheme(name).format(k),
        }
    }

    /// Format to which the projection weight `name` is rounded if it is bf16.
    fn rounds(&self, name: &str) -> Option<AtLoad> {
        self.at_load.filter(|_| self.rules.scheme(name) != Scheme::Bf16)
    }
}

/// How a part is loaded.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Loaded {
    Bf16,
    /// bf16, from groups whose columns are not neighbours.
    Dequantized,
    Fp8,
    Grouped(GroupFormat),
    /// Rounded from bf16.
    Rounded(GroupFormat),
}

impl Loaded {
    /// Method for a bf16 part that is rounded at load. Rows that are no multiple of 32 columns stay bf16.
    fn rounded(at_load: AtLoad, k: usize) -> Self {
        match at_load {
            AtLoad::Fp8 => Self::Fp8,
            AtLoad::Int4 => GroupFormat::rounded_int4(k).map_or(Self::Bf16, Self::Rounded),
        }
    }

    /// Method for a part of a projection with rows of `k` columns.
    fn of(
        loader: &Loader<'_>,
        quantization: Option<&Quantization>,
        part: &SourceTensor,
        k: usize,
    ) -> Result<Self, WeightsError> {
        let zeros = quantization.map_or(ZeroPoints::default(), |quantization| quantization.zeros);
        let format = match (loader.format(&part.name, zeros)?, quantization) {
            (Some(format), _) => format,
            (None, Some(quantization)) => quantization.format(&part.name, k),
            (None, None) => StoredFormat::Bf16,
        };
        let rounds = || quantization.and_then(|quantization| quantization.rounds(&part.name));
        Ok(match format {
            StoredFormat::Bf16 => rounds().map_or(Self::Bf16, |at_load| Self::rounded(at_load, k)),
            StoredFormat::Fp8 => Self::Fp8,
            StoredFormat::Grouped(format) => Self::Grouped(format),
            StoredFormat::ActOrder(_) => Self::Dequantized,
        })
    }
}

/// Loads the given columns of projection weights, stacked along their rows in the given order. Quantised weights stay as
/// they are stored, except groups of columns that are not neighbours, which become bf16; with dummy weights or rounding
/// at load, [`Quantization`] decides.
pub fn load_projection(
    loader: &mut Loader<'_>,
    quantization: Option<&Quantization>,
    title: &str,
    parts: &[SourceTensor],
    columns: impl Into<Columns>,
) -> Result<Matrix, WeightsError> {
    let columns = columns.into();
    let zeros = quantization.map_or(ZeroPoints::default(), |quantization| quantization.zeros);
    // Zeros have the format of the part before them.
    let mut formats = Vec::with_capacity(parts.len());
    for part in parts {
        let before = formats.last().copied().unwrap_or(Loaded::Bf16);
        formats.push(if part.is_zeros() { before } else { Loaded::of(loader, quantization, part, columns.stored)? });
    }
    let mut matrices = Vec::new();
    let mut first = 0;
    while first < parts.len() {
        let (mut end, mut rows) = (first + 1, parts[first].part.len());
        // Blocks extend into the next part only if they end with this one, or if that is zeros.
        let extends = |end: usize, rows: usize| {
            formats[first] != Loaded::Fp8 || parts[end].is_zeros() || rows.is_multiple_of(BLOCK)
        };
        while end < parts.len() && formats[end] == formats[first] && extends(end, rows) {
            rows += parts[end].part.len();
            end += 1;
        }
        let whole = end - first == parts.len();
        let title = if whole { title } else { &parts[first].name };
        let (parts, columns) = (&parts[first..end], columns.clone());
        matrices.push(match formats[first] {
            Loaded::Fp8 => {
                let (weight, scale) = loader.fp8(title, parts, columns, ops::quantize_fp8)?;
                ops::pack_fp8(loader.exec(), weight, scale)?
            }
            Loaded::Grouped(format) | Loaded::Rounded(format) => {
                let loaded = match formats[first] {
                    Loaded::Rounded(_) => loader.rounded_to_groups(title, parts, columns, format)?,
                    _ => loader.grouped(title, parts, columns, (format, zeros))?,
                };
                ops::pack_groups(loader.exec(), loaded.format, loaded.codes, loaded.scales)?
            }
            Loaded::Dequantized => Matrix::Bf16(loader.dequantized(title, parts, columns, zeros)?),
            Loaded::Bf16 => Matrix::Bf16(loader.stacked(title, parts, columns)?),
        });
        first = end;
    }
    Ok(if matrices.len() == 1 { matrices.remove(0) } else { Matrix::Stacked(matrices) })
}

/// Loads `rows` of an output matrix if it is quantised; `None` if it is bf16.
pub(super) fn load_quantized_head(
    loader: &mut Loader<'_>,
    quantization: Option<&Quantization>,
    rows: &[SourceTensor],
    columns: usize,
) -> Result<Option<Matrix>, WeightsError> {
    let Some(part) = rows.first().filter(|part| !part.is_zeros()) else { return Ok(None) };
    let zeros = quantization.map_or(ZeroPoints::default(), |quantization| quantization.zeros);
    let stored = match loader.format(&part.name, zeros)? {
        Some(format) => format,
        // The embedding of a tied model is quantised only if the checkpoint says so.
        None if part.name == HEAD => quantization.map_or(StoredFormat::Bf16, |q| q.format(HEAD, columns)),
        None => quantization.map_or(StoredFormat::Bf16, |q| q.stored_format(&part.name)),
    };
    match stored {
        StoredFormat::Bf16 => Ok(None),
        StoredFormat::Fp8 if !part.part.start.is_multiple_of(BLOCK) => Err(WeightsError::Quantized {
            name: part.name.clone(),
            message: format!("is FP8 in blocks of {BLOCK} rows, which this number of ranks would cut; use one rank"),
        }),
        _ => load_projection(loader, quantization, &part.name, rows, columns).map(Some),
    }
}

impl Quantization {
    /// True if the checkpoint next to config.json has the weight `name`, and not in bf16.
    pub(super) fn is_stored(&self, name: &str) -> bool {
        self.stored_format(name) != StoredFormat::Bf16
    }

    /// Format of a weight in the checkpoint next to config.json; bf16 without one.
    fn stored_format(&self, name: &str) -> StoredFormat {
        let format = self.stored.as_ref().and_then(|stored| stored.get(name));
        format.copied().unwrap_or(StoredFormat::Bf16)
    }
}
