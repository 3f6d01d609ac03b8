//! `ops::reduce_add_norm` in one kernel (csrc/collectives/add_norm.cu).

use super::VECTOR;
use super::algorithm::{Algorithm, fused};
use super::link::Link;
use crate::cuda::abi::{Entry, ReduceAddNorm};
use crate::cuda::fp8::padded_rows;
use crate::limits::collectives::{PUSH_THREADS, ROW_FLAGS};
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::record_reduce_add_norm;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Maximum number of blocks that a row has in the low-latency kernel; a power of two.
const ROW_BLOCKS: usize = 4;

/// Name in errors.
const OP: &str = "reduce_add_norm";

/// Kernels for two, four and eight ranks, for a weight in bf16 and in f32.
fn entry(algorithm: Algorithm, variant: usize, weight: DType) -> Entry<ReduceAddNorm<'static>> {
    type A = ReduceAddNorm<'static>;
    let entries = match algorithm {
        Algorithm::LowLatency => [
            [A::reduce_add_norm_ll_bf16_2, A::reduce_add_norm_ll_f32_2],
            [A::reduce_add_norm_ll_bf16_4, A::reduce_add_norm_ll_f32_4],
            [A::reduce_add_norm_ll_bf16_8, A::reduce_add_norm_ll_f32_8],
        ],
        _ => [
            [A::reduce_add_norm_rows_bf16_2, A::reduce_add_norm_rows_f32_2],
            [A::reduce_add_norm_rows_bf16_4, A::reduce_add_norm_rows_f32_4],
            [A::reduce_add_norm_rows_bf16_8, A::reduce_add_norm_rows_f32_8],
        ],
    };
    entries[variant][usize::from(weight == DType::F32)]
}

impl Link {
    /// Maximum number of rows of `bytes` bytes of one launch: those that the staging holds and that have flags.
    fn rows_at_once(&self, bytes: usize) -> usize {
        (self.stage_bytes / bytes).min(ROW_FLAGS / (PUSH_THREADS / 32))
    }

    /// Grid, threads of a block, and blocks of a cluster of a launch for `[rows, hidden]`, the same on every rank.
    fn grid_of_rows(&self, algorithm: Algorithm, (rows, hidden): (usize, usize)) -> (usize, usize, usize) {
        let (rows, warps) = (rows.next_power_of_two(), hidden.div_ceil(8 * 32));
        if algorithm != Algorithm::LowLatency {
            return (rows.min(self.blocks), 32 * warps + PUSH_THREADS, 1);
        }
        // With a row on several multiprocessors, fewer words wait in each.
        let cluster = if self.clusters { (self.blocks / rows).clamp(1, ROW_BLOCKS) } else { 1 };
        (rows * cluster, 32 * warps.div_ceil(cluster), cluster)
    }
}

/// `residual += Σ partial` over the ranks, then `out = rms_norm(residual) * weight`, by the kernel that [`fused`]
/// chooses; without one, returns false. More rows than the arenas hold take several launches of similar length.
pub fn reduce_add_norm(
    exec: &mut Exec,
    link: &Link,
    partial: &Tensor,
    residual: &mut Tensor,
    weight: &Tensor,
    eps: f32,
    out: &mut Tensor,
) -> Result<bool, OpError> {
    let (rows, hidden) = partial.rows_cols();
    let Some(algorithm) = fused(link.ranks, (rows, hidden), link.blocks) else { return Ok(false) };
    if [partial, residual, out].iter().any(|tensor| !tensor.device().is_multiple_of(VECTOR as u64)) {
        return Err(OpError { op: OP, message: format!("GPUs add whole vectors of {VECTOR} bytes") });
    }
    let sent = algorithm.sent(link.ranks, partial.bytes() as usize);
    record_reduce_add_norm(exec, algorithm.name(), [partial, residual, weight, out], link.ranks, sent);
    let launches = rows.div_ceil(link.rows_at_once(hidden * size_of::<bf16>()));
    let at_once = rows.div_ceil(launches.max(1));
    let (padded, gpu) = (padded_rows(out), exec.gpu()?);
    for first in (0..rows).step_by(at_once.max(1)) {
        let rows = at_once.min(rows - first);
        let Link { rank, ranks, arena, to: [to_0, to_1, to_2, to_3, to_4, to_5, to_6, to_7], .. } = *link;
        let Link { stage_bytes, status, timeout, .. } = *link;
        let (residual, out) = (&mut *residual, &mut *out);
        #[rustfmt::skip]
        let arguments = ReduceAddNorm {
            partial, residual, weight, out, padded, hidden, eps, first, rows, rank, ranks, arena, to_0, to_1, to_2,
            to_3, to_4, to_5, to_6, to_7, stage_bytes, status, timeout,
        };
        let launch = entry(algorithm, link.variant(), weight.dtype()).launch(gpu, OP, arguments)?;
        let (grid, threads, cluster) = link.grid_of_rows(algorithm, (rows, hidden));
        let launch = launch.cluster(cluster).early(weight).overlapped();
        // SAFETY: the op checked the shapes, and the rows lie within the tensors; the link has the addresses of live
        // arenas of the size that it names.
        unsafe { launch.run([grid, 1, 1], threads)? };
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::super::link::Grid;
    use super::*;

    #[test]
    fn rows_have_clusters_as_long_as_all_blocks_are_resident() {
        let link = |clusters| Link::new(0, &[0, 1 << 40], 0, 1, Grid { multiprocessors: 132, clusters });
        let of = |link: Link, rows, hidden| {
            fused(2, (rows, hidden), link.blocks).map(|by| link.grid_of_rows(by, (rows, hidden)))
        };
        assert_eq!(of(link(true), 1, 5120), Some((4, 160, 4)));
        assert_eq!(of(link(true), 25, 5120), Some((128, 160, 4)));
        assert_eq!(of(link(true), 51, 2560), Some((128, 160, 2)));
        assert_eq!(of(link(true), 100, 640), Some((128, 96, 1)));
        assert_eq!(of(link(false), 25, 5120), Some((32, 640, 1)));
        assert_eq!(of(link(true), 52, 5120), Some((64, 768, 1)));
        assert_eq!(of(link(true), 4096, 5120), Some((128, 768, 1)));
        assert_eq!(link(true).rows_at_once(2 * 5120), 4096);
    }
}
