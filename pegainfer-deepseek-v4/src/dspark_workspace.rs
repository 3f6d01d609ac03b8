//! Activations of DSpark's stages, in addition to those of the model's layers.

use crate::config::{Config, DSpark};
use crate::numerics::Numerics;
use crate::plan::{NO_STATE, PAGE_TOKENS, Step};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_runtime::Bounds;

/// Workspace of DSpark's stages, allocated once for the largest step, and inputs of a pass over blocks, with `T` tokens
/// and `B` rows. A block has `K` positions.
#[derive(Debug)]
pub(crate) struct DSparkWorkspace {
    /// Means of the streams after the target layers, for the tokens of a step, `[tokens, targets * hidden]`.
    pub main: Tensor,
    /// Position of the anchor of each token's block: the newest token before the block, `[T]` u32.
    pub anchor_positions: Tensor,
    /// The key of each token's anchor among the rows of all rings, `[T]` u32.
    pub anchor_rows: Tensor,
    /// First token of each block, `[B]` u32.
    pub first_tokens: Tensor,
    /// Each token's anchor's key, `[T, head_dim]`.
    pub anchor_keys: Tensor,
    /// Constant: distance of each token from its anchor, `[T]` u32.
    pub distances: Tensor,
    /// Constant: the tokens of each token's block, as compressed entries of one token each, `[T, K]` u32.
    pub block: Tensor,
    /// Constant: pages of these entries, in order, `[B, pages]` u32.
    pub page_tables: Tensor,
    /// Embeddings of the tokens before one position of each block, `[B, markov_rank]`.
    pub markov: Tensor,
    /// Their addend to the logits, `[B, vocab]` f32, rounded up to a multiple of 4 rows.
    pub transition: Tensor,
    /// Positions of a block.
    positions: usize,
}

impl DSparkWorkspace {
    /// A workspace for passes within `bounds`.
    pub fn new(
        exec: &mut Exec,
        config: &Config,
        numbers: &DSpark,
        numerics: Numerics,
        bounds: &Bounds,
    ) -> std::io::Result<Self> {
        let blocks = bounds.blocks(numbers.block, exec.device());
        let positions = numbers.block.tokens;
        let (tokens, act) = (blocks * positions, numerics.activations);
        let pages = tokens.div_ceil(PAGE_TOKENS);
        let inputs: [(&str, &[usize]); 3] =
            [("anchor_positions", &[tokens]), ("anchor_rows", &[tokens]), ("first_tokens", &[blocks])];
        let [anchor_positions, anchor_rows, first_tokens] = exec.adjacent(inputs, DType::U32)?;
        let mut tensor = |name: &str, shape: &[usize], dtype| exec.tensor(name, shape, dtype);
        let main = tensor("main", &[bounds.size.tokens, numbers.targets.len() * config.hidden_size], act)?;
        let anchor_keys = tensor("anchor_keys", &[tokens, config.head_dim], act)?;
        let markov = tensor("markov", &[blocks, numbers.markov_rank], act)?;
        let transition = tensor("transition", &[blocks.next_multiple_of(4), config.vocab_size], DType::F32)?;
        let mut distances = tensor("distances", &[tokens], DType::U32)?;
        let mut block = tensor("block", &[tokens, positions], DType::U32)?;
        let mut page_tables = tensor("page_tables", &[blocks, pages], DType::U32)?;
        let own = |i: usize| i / positions / positions * positions + i % positions;
        let rows: Vec<u32> = (0..tokens * positions).map(|i| own(i) as u32).collect();
        let tables: Vec<u32> = (0..blocks * pages).map(|i| (i % pages) as u32).collect();
        let offsets: Vec<u32> = (0..tokens).map(|t| (1 + t % positions) as u32).collect();
        let filled = exec.fill_rows(&mut block, &rows).and_then(|()| exec.fill_rows(&mut page_tables, &tables));
        let filled = filled.and_then(|()| exec.fill_rows(&mut distances, &offsets));
        filled.map_err(std::io::Error::other)?;
        Ok(Self {
            main,
            anchor_positions,
            anchor_rows,
            first_tokens,
            anchor_keys,
            distances,
            block,
            page_tables,
            markov,
            transition,
            positions,
        })
    }

    /// Takes a pass over blocks over: a copy to a GPU. `ring`: keys of a slot.
    pub fn fill(&mut self, exec: &mut Exec, pass: &Step, ring: usize) -> Result<(), OpError> {
        let (tokens, rows) = (pass.tokens.len(), pass.rows.len());
        let (mut positions, mut keys, mut first) = (vec![0; tokens], vec![0; tokens], vec![0; rows]);
        for (b, segment) in pass.state.iter().enumerate().filter(|(_, segment)| segment.to != NO_STATE) {
            let own = segment.first as usize..segment.end as usize;
            let anchor = pass.positions[own.start] - 1;
            first[b] = pass.tokens[own.start];
            positions[own.clone()].fill(anchor);
            keys[own].fill(segment.to * ring as u32 + anchor % ring as u32);
        }
        let Self { anchor_positions, anchor_rows, first_tokens, .. } = self;
        exec.fill_adjacent([anchor_positions, anchor_rows, first_tokens], [&positions, &keys, &first])?;
        for tensor in [&mut self.anchor_keys, &mut self.distances, &mut self.block] {
            tensor.set_rows(tokens);
        }
        for tensor in [&mut self.page_tables, &mut self.markov, &mut self.transition] {
            tensor.set_rows(rows);
        }
        debug_assert!(pass.queries().1 <= self.positions);
        Ok(())
    }
}
