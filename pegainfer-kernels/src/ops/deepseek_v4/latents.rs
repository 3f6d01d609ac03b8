//! Results of attention's latents: the normalised low rank of queries, keys, and compressed entries.

use super::batch::RaggedBatch;
use super::compress::NewEntries;
use super::norm::{check_rounded, norm_host};
use super::norm_rope::{check_rope, keys_host};
use super::packed::Rounded;
use super::rope::RopeTable;
use super::values::{cpu, read, rows};
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Inputs of [`attention_latents`], bf16 or f32.
#[derive(Debug, Clone, Copy)]
pub struct Latents<'a> {
    /// The low rank of queries, `[T, q_lora]`, and the weight of its norm, `[q_lora]` bf16.
    pub queries: (&'a Tensor, &'a Tensor),
    /// Keys before their norm, `[T, dim]`, and its weight, `[dim]` bf16.
    pub keys: (&'a Tensor, &'a Tensor),
    /// RoPE table of the layer.
    pub table: &'a RopeTable,
    /// Epsilon of all norms.
    pub eps: f32,
    /// True if keys and entries have the low precision of training.
    pub quantize: bool,
}

/// Outputs of [`attention_latents`].
#[derive(Debug)]
pub struct LatentOutputs<'a> {
    /// `[T, q_lora]`.
    pub queries: &'a mut Tensor,
    /// Result of `round_activation` on `queries`.
    pub rounded: Option<Rounded<'a>>,
    /// `[T, 1, dim]`.
    pub keys: &'a mut Tensor,
    /// New entries of the layer's compressor, and of its indexer's.
    pub entries: [Option<NewEntries<'a>>; 2],
}

/// The step of attention after its first GEMMs, in one launch on a GPU:
///
/// - `queries`: [`norm`](super::norm) of the low rank, also rounded
/// - `keys`: `norm` with its weight, then RoPE by the token's position, then, with `quantize`, the part that is not
///   rotated in FP8: groups of 64 values, each with the scale `2^ceil(log2(max(amax, 1e-4) / 448))`, e4m3, to nearest
///   even; each step rounded
/// - `entries`: those completed by tokens of the step; see [`NewEntries`]
pub fn attention_latents(
    exec: &mut Exec,
    x: Latents<'_>,
    batch: &RaggedBatch<'_>,
    mut out: LatentOutputs<'_>,
) -> Result<(), OpError> {
    let check = Check("attention_latents");
    let ((tokens, rank), (_, dim), dtype) = (x.queries.0.rows_cols(), x.keys.0.rows_cols(), x.queries.0.dtype());
    batch.check(check, tokens)?;
    rows(check, x.queries.0, (tokens, rank))?;
    check.is(x.queries.1, DType::Bf16, &[rank])?;
    check.is(out.queries, dtype, &[tokens, rank])?;
    check_rounded(check, out.queries, out.rounded.as_ref())?;
    rows(check, x.keys.0, (tokens, dim))?;
    check.is(x.keys.1, DType::Bf16, &[dim])?;
    rows(check, out.keys, (tokens, dim))?;
    check.that(x.keys.0.dtype() == dtype && out.keys.dtype() == dtype, "queries and keys must have the same dtype")?;
    check_rope(check, x.table, dim, x.quantize)?;
    for (place, new) in out.entries.iter().enumerate() {
        let Some(new) = new else { continue };
        new.check(check, tokens, dtype)?;
        let same = (new.spec.index, new.spec.quantize, new.spec.eps) == (place == 1, x.quantize, x.eps);
        check.that(same, "the compressors must be that of attention and that of the indexer, with its precision")?;
        check.that(new.spec.index || new.dim() == dim, "entries must be as wide as keys")?;
    }
    exec.record(|_| record(x, batch, &out));
    if exec.device() == Device::Cuda {
        return gpu::attention_latents(exec, x, batch, out);
    }
    if cpu(check, exec)?.is_some() {
        norm_host(read(x.queries.0).into_owned(), x.queries.1, x.eps, out.queries, out.rounded);
        keys_host(x.keys, (batch.positions, x.table), x.eps, x.quantize, out.keys);
        out.entries.iter_mut().flatten().for_each(|new| new.on_host(x.table, batch));
    }
    Ok(())
}

fn record(x: Latents<'_>, batch: &RaggedBatch<'_>, out: &LatentOutputs<'_>) -> OpRecord {
    let new = || out.entries.iter().flatten();
    let small = [x.queries.0, x.queries.1, x.keys.0, x.keys.1];
    let reads: Vec<&Tensor> =
        small.into_iter().chain(batch.operands()).chain(new().flat_map(NewEntries::operands)).collect();
    let rounded = out.rounded.as_ref().map(|rounded| &*rounded.values);
    let entries = new().map(|new| &*new.entries);
    let writes: Vec<&Tensor> = [&*out.queries].into_iter().chain(rounded).chain([&*out.keys]).chain(entries).collect();
    let rows = [x.queries.0, x.queries.1, x.keys.0, x.keys.1, out.queries, out.keys].into_iter().chain(rounded);
    let bytes = rows.map(Tensor::bytes).sum::<u64>() + new().map(NewEntries::bytes).sum::<u64>();
    let pooled: usize = new().map(|new| new.tokens.0.elements()).sum();
    let flops = 4 * x.queries.0.elements() + 8 * x.keys.0.elements() + 6 * pooled;
    OpRecord::new("attention_latents", "rows", &reads, &writes, flops as u64).with_bytes(bytes)
}
