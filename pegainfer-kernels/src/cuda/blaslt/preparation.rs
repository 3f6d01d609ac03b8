//! Plans GEMMs and loads their kernels for future row counts. During a step, a plan would take 0.1 ms, and loading a
//! kernel 4 ms.

use super::{BlasLt, GemmSize, Multiplied, Operands, Plan, m_bucket};
use crate::choice::DenseGemm;
use pegainfer_core::tensor::DType;
use std::collections::HashSet;
use std::iter::successors;
use std::time::Instant;

/// Minimum number of rows that are prepared: steps of fewer tokens run without the library.
const MIN_ROWS: usize = DenseGemm::MIN_TOKENS;

impl BlasLt {
    /// Plans every GEMM that has a plan and whose algorithms are not timed, for each M bucket from [`MIN_ROWS`] to
    /// `max_rows` rows, and runs each algorithm once.
    pub(super) fn prepare(&mut self, max_rows: usize) {
        let start = Instant::now();
        let at = |address| Operands { x: address, w: address, out: address, scales: (address, address) };
        let at = at(self.place.workspace);
        let like: HashSet<GemmSize> = self.plans.keys().map(|gemm| GemmSize { m: 0, ..*gemm }).collect();
        let mut loaded: HashSet<([u64; 8], Multiplied, DType)> = HashSet::new();
        let mut planned = 0;
        for gemm in like.into_iter().filter(|gemm| !gemm.is_tuned()) {
            for m in buckets(max_rows) {
                match self.plan(GemmSize { m, ..gemm }, at) {
                    Ok(plan) if loaded.insert((plan.algorithm.data, gemm.multiplied, gemm.out)) => {
                        self.load(gemm, &plan, at);
                    }
                    Ok(_) => {}
                    Err(error) => log::debug!("cuBLASLt has no algorithm for {m} rows of {gemm:?}: {error}"),
                }
                planned += 1;
            }
        }
        let (kernels, spent) = (loaded.len(), start.elapsed());
        log::debug!("cuBLASLt: {planned} GEMMs planned, {kernels} algorithms loaded in {spent:.1?}");
    }

    /// Runs the algorithm of `plan` once with few rows, which loads its kernel. Operands and result lie in the
    /// workspace and have arbitrary values.
    fn load(&self, gemm: GemmSize, plan: &Plan, at: Operands) {
        let few = GemmSize { m: m_bucket(MIN_ROWS), ..gemm };
        let Ok(layouts) = self.layouts(few) else { return };
        let small = Plan { algorithm: plan.algorithm, ..layouts };
        let fits = few.extent() <= gemm.multiplied.free_bytes();
        if fits && self.accepts(&small, at.scales, &plan.algorithm) {
            let ran = self.run(&small, at, false, &self.place);
            ran.unwrap_or_else(|error| log::debug!("cuBLASLt cannot run {few:?}: {error}"));
        }
        self.release(&layouts);
    }
}

/// The M buckets from that of [`MIN_ROWS`] rows to that of `max_rows`.
fn buckets(max_rows: usize) -> impl Iterator<Item = usize> {
    let last = m_bucket(max_rows);
    successors(Some(m_bucket(MIN_ROWS)), |m| Some(m_bucket(m + 1))).take_while(move |m| *m <= last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_count_has_a_bucket() {
        let all: Vec<usize> = buckets(4096).collect();
        assert!((MIN_ROWS..=4096).all(|m| all.contains(&m_bucket(m))));
        assert_eq!((all[0], all.len(), all.last()), (48, 46, Some(&4096)));
    }
}
