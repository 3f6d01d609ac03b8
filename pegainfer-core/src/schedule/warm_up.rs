//! What an engine computes before it serves on a GPU.

use super::graphs::SIZES;
use crate::cuda::served_rows;
use std::iter::successors;

/// Products of so many rows are cuBLASLt's on Hopper, which has to choose how. There are kernels for fewer.
const CHOSEN: usize = 97;
/// Tokens of usual prompts.
const USUAL: [usize; 3] = [1024, 2048, 4096];

/// Steps, each as its rows' tokens and contexts, see [`Step::ragged`](super::Step::ragged): what loads kernels and lets
/// cuBLASLt choose. The first requests would have to wait for that, and those before them, because the device has to be
/// idle for it. `mixed`: tokens of a mixed step; `most`: rows and tokens of the largest step, each at most what the KV pool
/// has room for.
pub fn warm_up(mixed: usize, most: (usize, usize)) -> Vec<Vec<(usize, usize)>> {
    let decoding = SIZES.into_iter().filter(|rows| *rows <= most.0).map(|rows| vec![(1, 1); rows]);
    let choices = successors(Some(served_rows(CHOSEN)), |rows| Some(served_rows(rows + 1)));
    let pieces = choices.take_while(|tokens| *tokens <= mixed.min(USUAL[0])).chain([mixed]);
    let mut prompts: Vec<usize> = pieces.chain(USUAL).map(|tokens| tokens.min(most.1)).collect();
    prompts.dedup();
    let prompts = prompts.into_iter().map(|tokens| vec![(tokens, tokens)]);
    // In such a step every row has as many blocks as the longest.
    let both = (1 < mixed && 1 < most.0 && 2 * mixed <= most.1).then(|| vec![(1, 1), (mixed - 1, mixed - 1)]);
    decoding.chain(prompts).chain(both).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_will_meet_is_warm() {
        let steps = warm_up(512, (256, 131_072));
        assert_eq!(steps[..3], [vec![(1, 1)], vec![(1, 1); 2], vec![(1, 1); 3]]);
        let prompts: Vec<usize> = steps.iter().filter(|rows| rows.len() == 1).map(|rows| rows[0].0).collect();
        assert_eq!(prompts[..4], [1, 112, 128, 144]);
        assert_eq!(prompts[16..], [448, 480, 512, 1024, 2048, 4096]);
        assert_eq!(steps.iter().map(Vec::len).max(), Some(256));
        assert_eq!(steps.last(), Some(&vec![(1, 1), (511, 511)]));
        assert_eq!(
            warm_up(8192, (1, 131_072)).len(),
            1 + 26 + 4,
            "one row, pieces of up to 1,024 tokens, and longer ones"
        );
        let few = warm_up(64, (1, 150));
        assert_eq!(few, [1, 64, 150].map(|tokens| vec![(tokens, tokens)]));
    }
}
