//! Brings weights to the device, fusing matrices that are used together.

use super::checkpoint::{Checkpoint, WeightsError};
use super::dummy;
use crate::exec::{Device, Exec};
use crate::tensor::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;
use std::path::Path;

/// Bytes that one thread copies at a time: large enough to stream, small enough to share and to show progress.
const COPY_CHUNK: usize = 4 << 20;

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
        let mut rest = tensor.host_mut::<bf16>();
        for part in parts {
            let (out, tail) = rest.split_at_mut(part.rows * cols.unwrap_or(1));
            rest = tail;
            fill(self.exec, self.source, &part.name, &shape(part.rows), out)?;
        }
        (self.progress)(tensor.bytes());
        Ok(tensor)
    }
}

fn fill(exec: &mut Exec, source: &Source, name: &str, shape: &[usize], out: &mut [bf16]) -> Result<(), WeightsError> {
    match source {
        Source::Checkpoint(checkpoint) => {
            let bytes = checkpoint.bf16(name, shape)?;
            let out: &mut [u8] = bytemuck::cast_slice_mut(out);
            exec.install(|_| {
                out.par_chunks_mut(COPY_CHUNK)
                    .zip(bytes.par_chunks(COPY_CHUNK))
                    .for_each(|(to, from)| to.copy_from_slice(from));
            });
        }
        // Of the vectors only norm weights are left; a norm multiplies by about 1.
        Source::Dummy { .. } if shape.len() == 1 => out.fill(bf16::ONE),
        Source::Dummy { seed, std } => {
            // A uniform distribution on ±a has the standard deviation a / √3.
            let (seed, limit) = (dummy::seed_of(*seed, name), std * 3f32.sqrt());
            exec.install(|_| dummy::uniform(out, seed, limit));
        }
    }
    Ok(())
}
