//! Adapters on a device: the matrices of every slot, and the slots of a step's tokens.

use super::layout::{AdapterValues, SlotValues, height, segments};
use super::options::{LoraOptions, slot_rank};
use super::pass::Adapters;
use crate::bounds::StepSize;
use crate::projection_source::{LayerSources, ProjectionSource};
use half::bf16;
use pegainfer_core::adapter::{Adapter, AdapterId};
use pegainfer_core::exec::Exec;
use pegainfer_core::schedule::{NO_ADAPTER, Step};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::lora::AdapterMatrices;
use std::io;

/// Memory of a rank for adapters.
#[derive(Debug)]
pub(crate) struct AdapterMemory {
    /// Matrices of each layer's projections.
    layers: Vec<[Option<AdapterMatrices>; 4]>,
    /// The adapter that each slot holds.
    held: Vec<Option<AdapterId>>,
    /// Slot of each token of the newest step, `[tokens]` u32.
    rows: Tensor,
    /// Slot of each sampled token, `[samples]` u32.
    sampled: Tensor,
}

impl AdapterMemory {
    /// Empty slots for `layers`, which the rank holds.
    pub fn new(exec: &mut Exec, layers: &[LayerSources], options: LoraOptions, size: StepSize) -> io::Result<Self> {
        let (max_loras, rank) = (options.max_loras, slot_rank(options.max_rank));
        let mut projection = |i: usize, source: &ProjectionSource| {
            let (segments, k, n) = (segments(source), source.columns.part.len(), height(source));
            let a = [max_loras, segments.len() * rank, k];
            let mut tensor =
                |what: &str, shape: &[usize]| exec.tensor(&format!("layers.{i}.{what}"), shape, DType::Bf16);
            let (a, b) = (tensor("lora_a", &a)?, tensor("lora_b", &[max_loras, n, rank])?);
            io::Result::Ok(AdapterMatrices { a, b, segments })
        };
        let mut layer = |(i, layer): (usize, &LayerSources)| {
            let [input, output, gate_up, down] =
                layer.all().map(|source| source.map(|source| projection(i, source)).transpose());
            io::Result::Ok([input?, output?, gate_up?, down?])
        };
        let layers = layers.iter().enumerate().map(&mut layer).collect::<io::Result<Vec<_>>>()?;
        Ok(Self {
            layers,
            held: vec![None; max_loras],
            rows: exec.tensor("adapters", &[size.tokens], DType::U32)?,
            sampled: exec.tensor("sampled_adapters", &[size.samples], DType::U32)?,
        })
    }

    /// Loads the adapters of a step into their slots, unless they are there, and uploads the slots of its tokens. `rank`:
    /// number of this rank.
    pub fn fill<R>(&mut self, exec: &mut Exec, step: &Step<R>, rank: usize) -> Result<(), OpError> {
        for (slot, adapter) in &step.adapters.held {
            self.hold(exec, *slot as usize, adapter, rank)?;
        }
        // Tokens after the last row pad the step.
        let mut rows = vec![NO_ADAPTER; step.tokens.len()];
        for (ends, slot) in step.qo_indptr.windows(2).zip(&step.adapters.rows) {
            rows[ends[0] as usize..ends[1] as usize].fill(*slot);
        }
        let sampled: Vec<u32> = step.samples.iter().map(|sample| rows[sample.token as usize]).collect();
        exec.fill_rows(&mut self.rows, &rows)?;
        exec.fill_rows(&mut self.sampled, &sampled)
    }

    /// Loads an adapter into a slot, unless it is there.
    fn hold(&mut self, exec: &mut Exec, slot: usize, adapter: &Adapter, rank: usize) -> Result<(), OpError> {
        if self.held[slot] == Some(adapter.id()) {
            return Ok(());
        }
        let unknown = || OpError { op: "lora", message: "the adapter was loaded for another model".to_owned() };
        let values =
            adapter.weights::<AdapterValues>().and_then(|values| values.ranks.get(rank)).ok_or_else(unknown)?;
        // A load that fails leaves a part of the matrices.
        self.held[slot] = None;
        for (matrices, values) in self.layers.iter_mut().flatten().zip(values.iter().flatten()) {
            let Some(AdapterMatrices { a, b, .. }) = matrices else { continue };
            let (new_a, new_b) = values.as_ref().map(|SlotValues { a, b }| (&a[..], &b[..])).unzip();
            write(exec, a, slot, new_a)?;
            write(exec, b, slot, new_b)?;
        }
        self.held[slot] = Some(adapter.id());
        Ok(())
    }

    /// The adapters of the step that this was filled for.
    pub fn adapters(&mut self) -> Adapters<'_> {
        Adapters::new(&self.layers, (&self.rows, &self.sampled))
    }
}

/// Writes the values of a slot; zeros without values.
fn write(exec: &mut Exec, tensor: &mut Tensor, slot: usize, values: Option<&[bf16]>) -> Result<(), OpError> {
    let elements = tensor.rows_cols().1;
    exec.write(tensor, slot * elements..(slot + 1) * elements, |first, chunk: &mut [bf16]| match values {
        Some(values) => chunk.copy_from_slice(&values[first..][..chunk.len()]),
        None => chunk.fill(bf16::ZERO),
    })
}
