//! Launchers of DeepSeek-V4's ops, whose activations are bf16 or f32. Kernels launched by [`run`] first wait for all
//! earlier kernels.

mod activations;
mod attention;
mod dummy;
mod experts;
mod experts_skinny;
mod experts_wgmma;
mod gemm;
mod hyper;
mod index;
mod large_expert;
mod large_gemm;
mod latents;
mod norm;
mod quant;
mod queries;
mod rings;
mod route;
mod skinny;
mod streams;

pub(crate) use attention::sparse_attention;
pub(crate) use dummy::{random_codes, random_numbers};
pub(crate) use experts::{routed_experts, shared_expert};
pub(crate) use experts_skinny::{fuses_experts, moe};
pub(crate) use experts_wgmma::packs_experts;
pub(crate) use gemm::{grouped_matmul, matmul};
pub(crate) use hyper::{has_hyper_merge_mix_norm, hyper_merge_mix_norm, hyper_mix};
pub(crate) use index::select_entries;
pub(crate) use large_expert::is_large_expert;
pub(crate) use large_gemm::{choose_large, rounds_many, widen_all};
pub(crate) use latents::attention_latents;
pub(crate) use norm::{norm, rope};
pub(crate) use quant::round_activation;
pub(crate) use queries::attention_queries;
pub(crate) use rings::{copy_slots, write_ring};
pub(crate) use route::{route_hash, route_learned};
pub(crate) use skinny::{pack_rows, project, projects, rounds_few, takes_split};
pub(crate) use streams::{add, embed, expand_streams, hyper_head, hyper_merge, mean_streams, pick_rows, resolve_ids};

use super::abi::{Arguments, Entry};
use crate::limits::deepseek_v4::ROW_THREADS;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Two entry points of a kernel: for activations in bf16, and in f32.
type Entries<A> = [Entry<A>; 2];

/// Launches the entry point for activations of `dtype`; does nothing if the grid is empty.
fn run<A: Arguments>(
    exec: &mut Exec,
    op: &'static str,
    entries: Entries<A>,
    dtype: DType,
    arguments: A,
    shape: ([usize; 3], usize),
) -> Result<(), OpError> {
    run_early(exec, op, entries, dtype, arguments, &[], shape)
}

/// Variant of [`run`] for a kernel that reads these tensors, which no kernel of a step writes, before it waits for
/// earlier kernels.
fn run_early<A: Arguments>(
    exec: &mut Exec,
    op: &'static str,
    entries: Entries<A>,
    dtype: DType,
    arguments: A,
    early: &[&Tensor],
    (grid, threads): ([usize; 3], usize),
) -> Result<(), OpError> {
    if grid.contains(&0) {
        return Ok(());
    }
    let entry = entries[usize::from(dtype == DType::F32)];
    let launch = entry.launch(exec.gpu()?, op, arguments)?.overlapped();
    let launch = early.iter().fold(launch, |launch, tensor| launch.early(tensor));
    // SAFETY: the ops checked the shapes, and the launchers sized the grid by them.
    unsafe { launch.run(grid, threads) }
}

/// One block for each of `rows` rows of `width` elements.
fn rows(rows: usize, width: usize) -> ([usize; 3], usize) {
    ([rows, 1, 1], width.next_multiple_of(32).clamp(32, ROW_THREADS))
}
