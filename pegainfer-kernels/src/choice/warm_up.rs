//! Steps that an engine runs on a GPU before it serves.

use super::{GemmShape, Gpu, Output, Skinny, WeightFormat};
use crate::cuda::m_bucket;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::schedule::GRAPH_SIZES;
use pegainfer_core::tensor::OpError;
use std::iter::successors;

/// Tokens of usual prompts.
const USUAL: [usize; 3] = [1024, 2048, 4096];

/// Steps that load kernels and let cuBLASLt choose algorithms, each as its rows' tokens and contexts; see
/// [`Step::ragged`](pegainfer_core::schedule::Step::ragged). Otherwise the first requests would wait for that, and so
/// would running ones, because the device must be idle for it. `mixed`: tokens of a mixed step; `largest`: rows and
/// tokens of the largest step that the KV pool holds. Empty without a GPU.
pub fn warm_up(exec: &mut Exec, mixed: usize, largest: (usize, usize)) -> Result<Vec<Vec<(usize, usize)>>, OpError> {
    let gpu = super::gpu(exec)?.filter(|_| exec.device() == Device::Cuda);
    Ok(gpu.map_or(Vec::new(), |gpu| steps(&gpu, mixed, largest)))
}

fn steps(gpu: &Gpu, mixed: usize, largest: (usize, usize)) -> Vec<Vec<(usize, usize)>> {
    let decoding = GRAPH_SIZES.into_iter().filter(|rows| *rows <= largest.0).map(|rows| vec![(1, 1); rows]);
    let autotuned = successors(Some(m_bucket(first_autotuned(gpu))), |rows| Some(m_bucket(rows + 1)));
    let chunks = autotuned.take_while(|tokens| *tokens <= mixed.min(USUAL[0])).chain([mixed]);
    let mut prompts: Vec<usize> = chunks.chain(USUAL).map(|tokens| tokens.min(largest.1)).collect();
    prompts.dedup();
    let prompts = prompts.into_iter().map(|tokens| vec![(tokens, tokens)]);
    // In such a step every row has as many blocks as the longest.
    let both = (1 < mixed && 1 < largest.0 && 2 * mixed <= largest.1).then(|| vec![(1, 1), (mixed - 1, mixed - 1)]);
    decoding.chain(prompts).chain(both).collect()
}

/// Minimum number of rows of a GEMM for which no skinny kernel exists with any weight, so that cuBLASLt's algorithms
/// must be timed.
fn first_autotuned(gpu: &Gpu) -> usize {
    let weight = GemmShape { m: 0, n: 4096, k: 4096, output: Output::Bf16, format: WeightFormat::Bf16 };
    let large = |m: &usize| Skinny::choose(gpu, GemmShape { m: *m, ..weight }).is_none();
    (1..).find(large).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_will_meet_is_warm() {
        let steps = steps(&Gpu::PLANNED, 512, (256, 131_072));
        assert_eq!(steps[..3], [vec![(1, 1)], vec![(1, 1); 2], vec![(1, 1); 3]]);
        let prompts: Vec<usize> = steps.iter().filter(|rows| rows.len() == 1).map(|rows| rows[0].0).collect();
        assert_eq!(prompts[..4], [1, 112, 128, 144]);
        assert_eq!(prompts[16..], [448, 480, 512, 1024, 2048, 4096]);
        assert_eq!(steps.iter().map(Vec::len).max(), Some(256));
        assert_eq!(steps.last(), Some(&vec![(1, 1), (511, 511)]));
        assert_eq!(
            super::steps(&Gpu::PLANNED, 8192, (1, 131_072)).len(),
            1 + 26 + 4,
            "one row, chunks of up to 1,024 tokens, and longer ones"
        );
        let few = super::steps(&Gpu::PLANNED, 64, (1, 150));
        assert_eq!(few, [1, 64, 150].map(|tokens| vec![(tokens, tokens)]));
    }

    #[test]
    fn gpus_without_warpgroups_have_more_row_counts_autotuned() {
        let first = |name: &str| first_autotuned(&Gpu::named(name).unwrap());
        assert_eq!(["H200", "A100", "L4", "B200", "RTX 5090"].map(first), [97, 17, 17, 17, 17]);
    }
}
