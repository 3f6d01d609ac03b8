//! The indexer: chooses the compressed entries that a token attends to.

use super::batch::{NO_ENTRY, PAGE_TOKENS, RaggedBatch};
use super::values::{Rows, activation, cpu, read};
use crate::cpu::deepseek_v4::index as reference;
use crate::cuda::deepseek_v4 as gpu;
use crate::limits::deepseek_v4_attention::SHARE_TOKENS;
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::team;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Tokens of a step for which one of several ranks chooses entries. Ranks take turns with blocks of 64 tokens, which
/// balances work, because later tokens see more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenShare {
    /// Number of the rank, from 0.
    pub rank: usize,
    /// Ranks in all.
    pub ranks: usize,
}

impl TokenShare {
    /// Tokens of a block.
    pub const BLOCK: usize = SHARE_TOKENS;
    /// All tokens.
    pub const ALL: Self = Self { rank: 0, ranks: 1 };

    /// Rows of each rank's choice, for a step of `tokens` tokens. With several ranks these are whole blocks, whose last
    /// tokens may not exist.
    pub fn rows(self, tokens: usize) -> usize {
        match self.ranks {
            1 => tokens,
            ranks => tokens.div_ceil(SHARE_TOKENS * ranks) * SHARE_TOKENS,
        }
    }

    /// Number in the step of the token with this row.
    fn token(self, row: usize) -> usize {
        (row / SHARE_TOKENS * self.ranks + self.rank) * SHARE_TOKENS + row % SHARE_TOKENS
    }
}

/// Candidates of a choice, and the rank's share.
#[derive(Debug, Clone, Copy)]
pub struct SelectSpec {
    /// Tokens of an entry.
    pub ratio: usize,
    /// Tokens that are chosen for.
    pub share: TokenShare,
    /// Maximum number of pages of a sequence in this step: as many as the tables have columns, or fewer.
    pub pages: usize,
}

/// The best-scoring visible entries of each token: `score[i] = scale · Σ_h weights[h] · relu(q[h] · entry[i])` for the
/// entries `i < (position + 1) / ratio`; all of them if they fit.
///
/// `q`: `[T, heads, dim]`, `weights`: `[T, heads]`, `entries`: `[pages, 128 / ratio, dim]`, bf16 or f32, all
/// transformed and rounded alike; `chosen`: `[share.rows(T), k]` u32, a row per token of the share, indices ascending,
/// then [`NO_ENTRY`], also in rows of tokens that do not exist. Scores are f32 (the reference's are bf16, with many
/// ties; vLLM and SGLang use f32). Ties go to the lower index. `dim` is a multiple of 32.
pub fn select_entries(
    exec: &mut Exec,
    q: &Tensor,
    weights: &Tensor,
    entries: &Tensor,
    spec: SelectSpec,
    batch: &RaggedBatch<'_>,
    chosen: &mut Tensor,
) -> Result<(), OpError> {
    let SelectSpec { ratio, share, pages: max_pages } = spec;
    let check = Check("select_entries");
    let &[tokens, heads, dim] = q.shape() else { return check.that(false, "q must be [tokens, heads, dim]") };
    let (pages, k) = (entries.rows_cols().0, chosen.rows_cols().1);
    batch.check(check, tokens)?;
    activation(check, q, &[tokens, heads, dim])?;
    activation(check, weights, &[tokens, heads])?;
    activation(check, entries, &[pages, PAGE_TOKENS / ratio, dim])?;
    check.is(chosen, DType::U32, &[share.rows(tokens), k])?;
    check.that(dim.is_multiple_of(32), "dim must be a multiple of 32")?;
    check.that(max_pages <= batch.page_tables.rows_cols().1, "more pages than a table has columns")?;
    exec.record(|_| {
        let visible = batch.page_tables.rows_cols().0 * max_pages * PAGE_TOKENS / ratio;
        let bytes = q.bytes() + chosen.bytes() + (visible * dim * entries.dtype().size()) as u64;
        let flops = 2 * (q.elements() * visible) as u64 / share.ranks as u64;
        let reads: Vec<&Tensor> = [q, weights, entries].into_iter().chain(batch.operands()).collect();
        OpRecord::new("select_entries", "scores", &reads, &[chosen], flops).with_bytes(bytes)
    });
    if exec.device() == Device::Cuda {
        return gpu::select_entries(exec, (q, weights, entries), spec, batch, chosen);
    }
    let Some(isa) = cpu(check, exec)? else { return Ok(()) };
    let (q, weights, entries, rows) = (read(q), read(weights), Rows::of(entries), batch.rows());
    let rows_of_tokens = rows.rows_of_tokens();
    let choose = |own: usize, chosen: &mut [u32]| {
        chosen.fill(NO_ENTRY);
        let t = share.token(own);
        let Some(&Some(row)) = rows_of_tokens.get(t) else { return };
        let visible = (rows.positions[t] as usize + 1) / ratio;
        let (q, weights) = (&q[t * heads * dim..][..heads * dim], &weights[t * heads..][..heads]);
        let entry = |i: usize| entries.row(rows.entry(row, i, PAGE_TOKENS / ratio), dim);
        let scores: Vec<f32> = match visible > k {
            true => (0..visible).map(|i| reference::score(isa, q, weights, &entry(i))).collect(),
            // Nothing to choose.
            false => vec![0.0; visible],
        };
        let best = reference::top_k(&scores, k);
        chosen[..best.len()].copy_from_slice(&best);
    };
    team::for_each_chunk(chosen.host_mut::<u32>(), k, choose);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};

    #[test]
    fn trap_09_ties_go_to_the_lower_index() {
        assert_eq!(reference::top_k(&[0.0, 1.0, 0.0, 0.0, 2.0, 0.0], 4), [0, 1, 2, 4]);
        assert_eq!(reference::top_k(&[-1.0, 0.0, -0.0, 0.0], 2), [1, 3], "the total order puts -0 below 0");
        assert_eq!(reference::top_k(&[3.0, 1.0], 2), [0, 1]);
    }

    #[test]
    fn every_token_chooses_among_what_it_sees_by_its_score() {
        Host::each(|mut host| {
            let (heads, dim, k) = (2, 32, 3);
            // One row of tokens 20 to 39, with its entries in pages 1 and 0.
            let tokens = 20;
            let q = host.bf16("q", &[tokens, heads, dim], &bf16s(tokens * heads * dim, 1));
            let weights = host.bf16("w", &[tokens, heads], &bf16s(tokens * heads, 2));
            let entries = host.bf16("entries", &[2, 32, dim], &bf16s(64 * dim, 3));
            let positions = host.u32("positions", &(20..40).collect::<Vec<_>>());
            let (indptr, slots) = (host.u32("qo_indptr", &[0, 20]), host.u32("slots", &[0]));
            let mut tables = host.zeros("tables", &[1, 2], DType::U32);
            tables.host_mut::<u32>().copy_from_slice(&[1, 0]);
            let batch = RaggedBatch { qo_indptr: &indptr, positions: &positions, slots: &slots, page_tables: &tables };
            let mut chosen = host.zeros("chosen", &[tokens, k], DType::U32);
            let spec = SelectSpec { ratio: 4, share: TokenShare::ALL, pages: 2 };
            select_entries(&mut host.exec, &q, &weights, &entries, spec, &batch, &mut chosen).unwrap();
            let (q, w, e) = (read(&q), read(&weights), read(&entries));
            for (t, got) in chosen.host::<u32>().chunks(k).enumerate() {
                let score = |i: usize| -> f64 {
                    let dot = |h: usize| -> f64 {
                        let q = &q[(t * heads + h) * dim..][..dim];
                        q.iter().zip(&e[(32 + i) * dim..]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
                    };
                    (0..heads).map(|h| f64::from(w[t * heads + h]) * dot(h).max(0.0)).sum()
                };
                let mut order: Vec<usize> = (0..(20 + t + 1) / 4).collect();
                order.sort_by(|a, b| score(*b).total_cmp(&score(*a)).then(a.cmp(b)));
                let mut expected: Vec<u32> = order[..k].iter().map(|i| *i as u32).collect();
                expected.sort_unstable();
                assert_eq!(got, expected, "token {t}");
            }
        });
    }

    #[test]
    fn the_choices_of_all_ranks_in_turn_are_those_of_one() {
        Host::each(|mut host| {
            let (heads, dim, k, tokens) = (2, 32, 3, 3 * SHARE_TOKENS + 5);
            let q = host.bf16("q", &[tokens, heads, dim], &bf16s(tokens * heads * dim, 1));
            let weights = host.bf16("w", &[tokens, heads], &bf16s(tokens * heads, 2));
            let entries = host.bf16("entries", &[2, 32, dim], &bf16s(64 * dim, 3));
            let positions = host.u32("positions", &(10..10 + tokens as u32).collect::<Vec<_>>());
            let (indptr, slots) = (host.u32("qo_indptr", &[0, tokens as u32]), host.u32("slots", &[0]));
            let mut tables = host.zeros("tables", &[1, 2], DType::U32);
            tables.host_mut::<u32>().copy_from_slice(&[1, 0]);
            let batch = RaggedBatch { qo_indptr: &indptr, positions: &positions, slots: &slots, page_tables: &tables };
            let mut choose = |share: TokenShare| {
                let mut chosen = host.zeros("chosen", &[share.rows(tokens), k], DType::U32);
                let spec = SelectSpec { ratio: 4, share, pages: 2 };
                select_entries(&mut host.exec, &q, &weights, &entries, spec, &batch, &mut chosen).unwrap();
                chosen.host::<u32>().to_vec()
            };
            let whole = choose(TokenShare::ALL);
            for ranks in [2, 3] {
                let parts: Vec<_> = (0..ranks).map(|rank| choose(TokenShare { rank, ranks })).collect();
                let blocks = |i: usize| parts.iter().map(move |part| &part[i * SHARE_TOKENS * k..][..SHARE_TOKENS * k]);
                let gathered = (0..parts[0].len() / (SHARE_TOKENS * k)).flat_map(blocks).flatten();
                let (gathered, rest): (Vec<_>, Vec<_>) =
                    gathered.copied().enumerate().partition(|(i, _)| i / k < tokens);
                assert_eq!(gathered.into_iter().map(|(_, entry)| entry).collect::<Vec<_>>(), whole, "{ranks} ranks");
                assert!(rest.iter().all(|(_, entry)| *entry == NO_ENTRY), "there are no such tokens");
            }
        });
    }
}
