//! Queries of attention and of its indexer after their GEMM, and the tokens that compressors keep.

use super::batch::RaggedBatch;
use super::compress::KeptTokens;
use super::kv_quant::{index_row, round};
use super::norm_rope::{check_rope, queries_host};
use super::rope::{RopeTable, rotate};
use super::values::{activation, cpu, read, write};
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{OpError, Tensor};

/// Operands that [`attention_queries`] changes.
#[derive(Debug)]
pub struct Queries<'a> {
    /// `[T, heads, dim]` bf16 or f32, in place.
    pub heads: &'a mut Tensor,
    /// Queries of the indexer, `[T, index_heads, index_dim]`, in place; `index_dim` a power of two, at least 64.
    pub index: Option<&'a mut Tensor>,
    /// The tokens kept by the layer's compressor and by its indexer's.
    pub kept: [Option<KeptTokens<'a>>; 2],
}

/// The step of attention after the GEMMs of queries, in one launch on a GPU. Follows `attention_latents` of the step:
///
/// - `heads`: each is divided by its root mean square, without a weight, and rotated by its token's position; each step
///   rounded
/// - `index`: each head is rotated, multiplied by the Hadamard matrix and, with `quantize`, rounded to FP4, like the
///   indexer's entries
/// - `kept`: values and scores of the newest tokens are written to the rings, scores with their bias
pub fn attention_queries(
    exec: &mut Exec,
    mut x: Queries<'_>,
    table: &RopeTable,
    batch: &RaggedBatch<'_>,
    (eps, quantize): (f32, bool),
) -> Result<(), OpError> {
    let check = Check("attention_queries");
    let &[tokens, heads, dim] = x.heads.shape() else { return check.that(false, "heads must be [tokens, heads, dim]") };
    batch.check(check, tokens)?;
    activation(check, x.heads, &[tokens, heads, dim])?;
    check_rope(check, table, dim, false)?;
    if let Some(index) = x.index.as_deref() {
        let &[_, heads, dim] = index.shape() else { return check.that(false, "index must be [tokens, heads, dim]") };
        check.is(index, x.heads.dtype(), &[tokens, heads, dim])?;
        check.that(dim.is_power_of_two() && dim >= 64, "index_dim must be a power of two, at least 64")?;
        check_rope(check, table, dim, false)?;
    }
    x.kept.iter().flatten().try_for_each(|kept| kept.check(check, tokens))?;
    exec.record(|_| record(&x, batch));
    if exec.device() == Device::Cuda {
        return gpu::attention_queries(exec, x, table, batch, (eps, quantize));
    }
    if cpu(check, exec)?.is_some() {
        queries_host(x.heads, (batch.positions, table), eps);
        if let Some(index) = x.index {
            index_host(index, (batch.positions, table), quantize);
        }
        x.kept.iter_mut().flatten().for_each(|kept| kept.on_host(batch));
    }
    Ok(())
}

/// Queries of the indexer on the host.
fn index_host(x: &mut Tensor, (positions, table): (&Tensor, &RopeTable), quantize: bool) {
    let (heads, dim, dtype) = (x.shape()[1], x.shape()[2], x.dtype());
    let mut values = read(x).into_owned();
    rotate(&mut values, (heads, dim), positions, table, false);
    round(&mut values, dtype);
    values.chunks_exact_mut(dim).for_each(|head| index_row(head, dtype, quantize));
    write(x, &values);
}

fn record(x: &Queries<'_>, batch: &RaggedBatch<'_>) -> OpRecord {
    let queries = || [&*x.heads].into_iter().chain(x.index.as_deref());
    let kept = || x.kept.iter().flatten();
    let reads: Vec<&Tensor> = queries().chain(batch.operands()).chain(kept().flat_map(KeptTokens::operands)).collect();
    let rings = kept().flat_map(|kept| [&kept.state.values, &kept.state.scores]);
    let writes: Vec<&Tensor> = queries().chain(rings).collect();
    let bytes =
        2 * queries().map(Tensor::bytes).sum::<u64>() + kept().map(|kept| 4 * kept.tokens.0.bytes()).sum::<u64>();
    let flops = 4 * x.heads.elements() + 12 * x.index.as_deref().map_or(0, Tensor::elements);
    OpRecord::new("attention_queries", "heads", &reads, &writes, flops as u64).with_bytes(bytes)
}
