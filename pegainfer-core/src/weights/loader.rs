//! Loads weights to the device, stacking matrices that are used by one GEMM.

mod fp8;
mod grouped;
mod part_reader;
mod ranks;
mod raw;
mod request;
mod shared;
mod source;
mod source_tensor;

pub use fp8::Quantize;
pub use grouped::{GroupedTensors, format_of, grouped_scale_name};
pub use raw::FillDummy;
pub use source::{RandomBytes, Source, Uniform};
pub use source_tensor::{Columns, SourceTensor};

use super::checkpoint::Checkpoint;
use super::dummy;
use super::error::WeightsError;
use super::stored::Stored;
use crate::cuda::Target;
use crate::exec::{Device, Exec};
use crate::tensor::{DType, Element, Tensor};
use half::bf16;
use part_reader::{Check, PartReader};
use rayon::prelude::*;
use request::Request;
use shared::Reads;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Mutex;

/// Bytes that a thread reads at a time: large enough to stream, small enough to distribute.
const READ_CHUNK: usize = 1 << 20;

/// Loads tensors and reports the progress in bytes.
pub struct Loader<'a> {
    exec: &'a mut Exec,
    source: &'a Source,
    progress: &'a mut (dyn FnMut(u64) + Send),
    /// Names of all requested tensors.
    used: HashSet<String>,
    /// Number of tensors that were rounded to bf16 while reading.
    rounded: usize,
    /// Pending uploads to the GPU. They run after all tensors are allocated, because allocating waits for copies.
    queued: Vec<Queued<'a>>,
    /// How requested parts of a checkpoint are read.
    reads: Reads<'a>,
}

/// A pending upload.
struct Queued<'a> {
    target: Target,
    reader: PartReader<'a>,
}

impl<'a> Loader<'a> {
    /// Loads the tensors that `load` requests; on return, all are on the device. `progress` is called with the size in
    /// bytes of each loaded chunk.
    pub fn run<R>(
        exec: &'a mut Exec,
        source: &'a Source,
        progress: &'a mut (dyn FnMut(u64) + Send),
        load: impl FnOnce(&mut Self) -> Result<R, WeightsError>,
    ) -> Result<R, WeightsError> {
        Self::run_with(exec, source, progress, Reads::Direct, load)
    }

    fn run_with<R>(
        exec: &'a mut Exec,
        source: &'a Source,
        progress: &'a mut (dyn FnMut(u64) + Send),
        reads: Reads<'a>,
        load: impl FnOnce(&mut Self) -> Result<R, WeightsError>,
    ) -> Result<R, WeightsError> {
        let mut loader = Self::new(exec, source, progress, reads);
        let loaded = load(&mut loader)?;
        loader.upload()?;
        Ok(loaded)
    }

    fn new(
        exec: &'a mut Exec,
        source: &'a Source,
        progress: &'a mut (dyn FnMut(u64) + Send),
        reads: Reads<'a>,
    ) -> Self {
        Self { exec, source, progress, used: HashSet::new(), rounded: 0, queued: Vec::new(), reads }
    }

    /// True if tensors have only shapes, and nothing is noted of the source either.
    fn only_shapes(&self) -> bool {
        self.exec.device() == Device::Meta && !matches!(self.reads, Reads::Listed(_))
    }

    /// The parts of the checkpoint that were requested, if they are [listed](Reads::Listed).
    fn into_requests(self) -> Vec<Request<'a>> {
        match self.reads {
            Reads::Listed(requests) => requests,
            Reads::Direct | Reads::Shared(..) => Vec::new(),
        }
    }

    /// The device that the tensors are for.
    pub fn exec(&mut self) -> &mut Exec {
        self.exec
    }

    /// Names of the tensors of the source that were not requested, sorted.
    pub fn unused(&self) -> Vec<&'a str> {
        let source: &'a Source = self.source;
        let mut names: Vec<&str> = source.names().filter(|name| !self.used.contains(*name)).collect();
        names.sort_unstable();
        names
    }

    /// Shape of a tensor of the checkpoint; `None` for one that it does not have, and for dummy weights.
    pub fn stored_shape(&self, name: &str) -> Option<&'a [usize]> {
        match self.source {
            Source::Checkpoint(checkpoint) => checkpoint.describe(name).map(|(_, shape)| shape),
            Source::Dummy { .. } => None,
        }
    }

    /// Number of tensors so far that are rounded to bf16 while they are read.
    pub fn rounded(&self) -> usize {
        self.rounded
    }

    /// Loads a vector `[len]`, bf16.
    pub fn vector(&mut self, name: String, len: usize) -> Result<Tensor, WeightsError> {
        let title = name.clone();
        self.load(&title, &[SourceTensor::whole(name, len)], None)
    }

    /// Loads a matrix `[rows, cols]`, bf16.
    pub fn matrix(&mut self, name: String, rows: usize, cols: usize) -> Result<Tensor, WeightsError> {
        let title = name.clone();
        self.stacked(&title, &[SourceTensor::whole(name, rows)], cols)
    }

    /// Loads the given columns of matrices, bf16, stacked along their rows in the given order: one GEMM instead of
    /// several.
    pub fn stacked(
        &mut self,
        title: &str,
        parts: &[SourceTensor],
        columns: impl Into<Columns>,
    ) -> Result<Tensor, WeightsError> {
        self.load(title, parts, Some(columns.into()))
    }

    /// Loads a small tensor of shape `to`, which `convert` computes from a checkpoint tensor of shape `from`, stored as
    /// bf16, f16 or f32. With dummy weights, all values of that are `dummy`.
    pub fn converted<T: Element>(
        &mut self,
        name: String,
        from: &[usize],
        dummy: f32,
        to: &[usize],
        convert: impl FnOnce(Vec<f32>) -> Vec<T>,
    ) -> Result<Tensor, WeightsError> {
        self.used.insert(name.clone());
        let mut tensor = self.allocate(&name, to, T::DTYPE)?;
        if self.exec.device() == Device::Meta {
            return Ok(tensor);
        }
        let values = convert(match self.source {
            Source::Checkpoint(checkpoint) => checkpoint.widened(&name, from)?,
            Source::Dummy { .. } => vec![dummy; from.iter().product()],
        });
        let elements = tensor.elements();
        assert_eq!(values.len(), elements, "{name}");
        let copy = |first: usize, out: &mut [T]| out.copy_from_slice(&values[first..][..out.len()]);
        self.exec.write(&mut tensor, 0..elements, copy)?;
        (self.progress)(tensor.bytes());
        Ok(tensor)
    }

    fn load(&mut self, title: &str, parts: &[SourceTensor], columns: Option<Columns>) -> Result<Tensor, WeightsError> {
        self.used.extend(parts.iter().map(|part| part.name.clone()));
        let rows = parts.iter().map(|part| part.part.len()).sum();
        let width = columns.as_ref().map(|columns| columns.part.len());
        let shape: Vec<usize> = std::iter::once(rows).chain(width).collect();
        let mut tensor = self.allocate(title, &shape, DType::Bf16)?;
        if self.only_shapes() {
            return Ok(tensor);
        }
        let mut first = 0;
        for part in parts {
            tensor.set_range(first, part.part.len());
            first += part.part.len();
            // Memory is allocated as zeros.
            if part.is_zeros() {
                (self.progress)(tensor.bytes());
            } else {
                self.fill(part, columns.as_ref(), &mut tensor)?;
            }
        }
        tensor.set_rows(first);
        Ok(tensor)
    }

    fn allocate(&mut self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor, WeightsError> {
        self.exec.tensor(name, shape, dtype).map_err(|error| WeightsError::OutOfMemory {
            name: name.to_owned(),
            bytes: (shape.iter().product::<usize>() * dtype.size()) as u64,
            error,
        })
    }

    /// A stored tensor, read as bf16.
    fn bf16(
        &mut self,
        checkpoint: &'a Checkpoint,
        part: &SourceTensor,
        columns: Option<&Columns>,
    ) -> Result<Stored<'a>, WeightsError> {
        let stored = checkpoint.bf16(&part.name, &part.stored_shape(columns))?;
        self.rounded += usize::from(stored.is_rounded());
        Ok(stored)
    }

    /// Fills the current row range of `tensor` with a part of a tensor of the source, now or in
    /// [`upload`](Self::upload).
    fn fill(
        &mut self,
        part: &SourceTensor,
        columns: Option<&Columns>,
        tensor: &mut Tensor,
    ) -> Result<(), WeightsError> {
        if let Source::Checkpoint(checkpoint) = self.source {
            let stored = self.bf16(checkpoint, part, columns)?;
            return self.place(Request::new(stored, part, columns), Check::Any, tensor);
        }
        self.dummy(part, columns, tensor)?;
        (self.progress)(tensor.bytes());
        Ok(())
    }

    /// Fills the current row range of `tensor` with the requested part of the checkpoint: a host tensor now, a tensor on
    /// a GPU in [`upload`](Self::upload).
    fn place(&mut self, request: Request<'a>, check: Check, tensor: &mut Tensor) -> Result<(), WeightsError> {
        if let Reads::Listed(requests) = &mut self.reads {
            requests.push(request);
            return Ok(());
        }
        let reader = PartReader::new(request, check, &mut self.reads);
        if let Some(target) = tensor.target() {
            self.queued.push(Queued { target, reader });
            return Ok(());
        }
        self.read(&reader, tensor)?;
        (self.progress)(tensor.bytes());
        Ok(())
    }

    /// Reads a part of the checkpoint into the current row range of `tensor`, which is on the host.
    fn read(&self, reader: &PartReader<'_>, tensor: &mut Tensor) -> Result<(), WeightsError> {
        let out = tensor.host_bytes_mut();
        if reader.is_shared() {
            return reader.read(0, out);
        }
        let chunks = out.par_chunks_mut(READ_CHUNK).enumerate();
        self.exec.on_host(|| chunks.try_for_each(|(i, chunk)| reader.read(i * READ_CHUNK, chunk)))
    }

    /// Fills the current row range of `tensor` with dummy weights; no effect if the source is a checkpoint.
    fn dummy(
        &mut self,
        part: &SourceTensor,
        columns: Option<&Columns>,
        tensor: &mut Tensor,
    ) -> Result<(), WeightsError> {
        let Source::Dummy { seed, std, uniform, .. } = self.source else { return Ok(()) };
        if columns.is_none() {
            // All vectors are norm weights, with values of about 1.
            return Ok(self.exec.write(tensor, 0..part.part.len(), |_, to| to.fill(bf16::ONE))?);
        }
        // A uniform distribution on ±a has the standard deviation a / √3.
        let (seed, limit) = (dummy::seed_of(*seed, &part.title(columns)), std * 3f32.sqrt());
        Ok(self.exec.install(|exec| uniform(exec, seed, limit, tensor))??)
    }

    /// Fills `rows` of `tensor`, a matrix of dummy weights named `title`, with values of `gain` times the standard
    /// deviation of others; no effect if the source is a checkpoint.
    pub fn scale_dummy(
        &mut self,
        title: &str,
        rows: Range<usize>,
        gain: f32,
        tensor: &mut Tensor,
    ) -> Result<(), WeightsError> {
        let Source::Dummy { seed, std, uniform, .. } = self.source else { return Ok(()) };
        if self.only_shapes() {
            return Ok(());
        }
        let (all, limit, seed) = (tensor.rows_cols().0, gain * std * 3f32.sqrt(), dummy::seed_of(*seed, title));
        tensor.set_range(rows.start, rows.len());
        self.exec.install(|exec| uniform(exec, seed, limit, tensor))??;
        tensor.set_rows(all);
        Ok(())
    }

    /// Uploads all pending tensors to the GPU, and waits for the copies.
    fn upload(self) -> Result<(), WeightsError> {
        let Self { exec, progress, queued, .. } = self;
        let targets: Vec<Target> = queued.iter().map(|queued| queued.target.clone()).collect();
        let progress = Mutex::new(progress);
        exec.upload(&targets, |i, first, out| {
            queued[i].reader.read(first, out)?;
            // A poisoned lock only means that the progress callback panicked on another thread.
            let mut progress = progress.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            progress(out.len() as u64);
            Ok(())
        })
    }
}
