//! Brings weights to the device, fusing matrices that are used together.

use super::checkpoint::{Checkpoint, WeightsError};
use super::dummy;
use crate::exec::{Device, Exec};
use crate::tensor::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;
use std::path::Path;

/// Bytes that one thread copies at a time: large enough to stream, small enough to share.
const COPY_CHUNK: usize = 1 << 20;

/// Where weights come from.
#[derive(Debug)]
pub enum Source {
    /// Files.
    Checkpoint(Checkpoint),
    /// Seeded random values: norm weights are 1, the rest uniform with this standard deviation.
    Dummy {
        /// Same seed, same weights.
        seed: u64,
        /// `initializer_range` of the config.
        std: f32,
    },
}

impl Source {
    /// The checkpoint in `dir`.
    pub fn open(dir: &Path) -> Result<Self, WeightsError> {
        Checkpoint::open(dir).map(Self::Checkpoint)
    }

    /// True when the source can give this tensor.
    pub fn contains(&self, name: &str) -> bool {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.contains(name),
            Self::Dummy { .. } => true,
        }
    }
}

/// One tensor of the checkpoint that becomes some rows of a loaded one.
#[derive(Debug, Clone)]
pub struct Part {
    /// Name in the checkpoint.
    pub name: String,
    /// Its rows.
    pub rows: usize,
}

/// Loads tensors one after another and reports the bytes done.
pub struct Loader<'a> {
    exec: &'a mut Exec,
    source: &'a Source,
    progress: &'a mut dyn FnMut(u64),
}

impl<'a> Loader<'a> {
    /// `progress` is called with the size of each tensor as it is loaded, in bytes.
    pub fn new(exec: &'a mut Exec, source: &'a Source, progress: &'a mut dyn FnMut(u64)) -> Self {
        Self { exec, source, progress }
    }

    /// A vector `[len]` bf16.
    pub fn vector(&mut self, name: String, len: usize) -> Result<Tensor, WeightsError> {
        let title = name.clone();
        self.load(&title, &[Part { name, rows: len }], None)
    }

    /// A matrix `[rows, cols]` bf16.
    pub fn matrix(&mut self, name: String, rows: usize, cols: usize) -> Result<Tensor, WeightsError> {
        let title = name.clone();
        self.load(&title, &[Part { name, rows }], Some(cols))
    }

    /// Matrices of `cols` columns stacked along their rows, in the given order: one GEMM instead of several.
    pub fn stacked(&mut self, title: &str, parts: &[Part], cols: usize) -> Result<Tensor, WeightsError> {
        self.load(title, parts, Some(cols))
    }

    fn load(&mut self, title: &str, parts: &[Part], cols: Option<usize>) -> Result<Tensor, WeightsError> {
        let shape = |rows: usize| -> Vec<usize> { std::iter::once(rows).chain(cols).collect() };
        let whole = shape(parts.iter().map(|p| p.rows).sum());
        let mut tensor = self.exec.tensor(title, &whole, DType::Bf16).map_err(|error| WeightsError::OutOfMemory {
            name: title.to_owned(),
            bytes: whole.iter().product::<usize>() as u64 * 2,
            error,
        })?;
        if self.exec.device() == Device::Meta {
            return Ok(tensor);
        }
        let mut first = 0;
        for part in parts {
            let range = first..first + part.rows * cols.unwrap_or(1);
            first = range.end;
            fill(self.exec, self.source, &part.name, &shape(part.rows), &mut tensor, range)?;
        }
        (self.progress)(tensor.bytes());
        Ok(tensor)
    }
}

/// Fills `range` of `tensor` with the tensor `name` of the source, on all threads.
fn fill(
    exec: &mut Exec,
    source: &Source,
    name: &str,
    shape: &[usize],
    tensor: &mut Tensor,
    range: Range<usize>,
) -> Result<(), WeightsError> {
    let filled = match source {
        Source::Checkpoint(checkpoint) => {
            let bytes = checkpoint.bf16(name, shape)?;
            exec.write(tensor, range, |first, out: &mut [bf16]| {
                let out: &mut [u8] = bytemuck::cast_slice_mut(out);
                let bytes = &bytes[first * size_of::<bf16>()..][..out.len()];
                let pairs = out.par_chunks_mut(COPY_CHUNK).zip(bytes.par_chunks(COPY_CHUNK));
                pairs.for_each(|(to, from)| to.copy_from_slice(from));
            })
        }
        // Of the vectors only norm weights are left; a norm multiplies by about 1.
        Source::Dummy { .. } if shape.len() == 1 => exec.write(tensor, range, |_, out| out.fill(bf16::ONE)),
        Source::Dummy { seed, std } => {
            // A uniform distribution on ±a has the standard deviation a / √3.
            let (seed, limit) = (dummy::seed_of(*seed, name), std * 3f32.sqrt());
            exec.write(tensor, range, |first, out| dummy::uniform(out, first, seed, limit))
        }
    };
    filled.map_err(|error| WeightsError::Copy { name: name.to_owned(), error })
}
