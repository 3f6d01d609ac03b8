//! Plans and kernels for row counts that have not come yet: made in a step, a plan takes 0.1 ms, and a kernel that the library has not
//! loaded 4 ms.

use super::{BlasLt, GemmSize, Multiplied, Operands, Plan, m_bucket};
use pegainfer_core::tensor::DType;
use std::collections::HashSet;
use std::iter::successors;
use std::time::Instant;

/// Fewest rows that are prepared.
const LEAST: usize = 129;

impl BlasLt {
    /// Plans GEMMs like those so far whose algorithms are not timed for the buckets of row counts up to `most`, and runs each algorithm
    /// once.
    pub(super) fn prepare(&mut self, most: usize) {
        let start = Instant::now();
        let at = |address| Operands { x: address, w: address, out: address, scales: (address, address) };
        let at = at(self.workspace);
        let like: HashSet<GemmSize> = self.plans.keys().map(|gemm| GemmSize { m: 0, ..*gemm }).collect();
        let mut loaded: HashSet<([u64; 8], Multiplied, DType)> = HashSet::new();
        let mut planned = 0;
        for gemm in like.into_iter().filter(|gemm| !gemm.is_tuned()) {
            for m in buckets(most) {
                match self.plan(GemmSize { m, ..gemm }, at) {
                    Ok(plan) if loaded.insert((plan.algorithm.data, gemm.multiplied, gemm.out)) => {
                        self.load(gemm, &plan, at);
                    }
                    Ok(_) => {}
                    Err(error) => log::debug!("cuBLASLt has nothing for {m} rows of {gemm:?}: {error}"),
                }
                planned += 1;
            }
        }
        let (kernels, spent) = (loaded.len(), start.elapsed());
        log::debug!("cuBLASLt: {planned} GEMMs planned, {kernels} algorithms loaded in {spent:.1?}");
    }

    /// Runs the algorithm of `plan` with few rows, in the workspace: whose numbers do not matter.
    fn load(&self, gemm: GemmSize, plan: &Plan, at: Operands) {
        let few = GemmSize { m: m_bucket(LEAST), ..gemm };
        let Ok(layouts) = self.layouts(few) else { return };
        let small = Plan { algorithm: plan.algorithm, ..layouts };
        let fits = few.extent() <= gemm.multiplied.free_bytes();
        if fits && self.accepts(&small, at.scales, &plan.algorithm) {
            let ran = self.run(&small, at, false);
            ran.unwrap_or_else(|error| log::debug!("cuBLASLt cannot run {few:?}: {error}"));
        }
        self.release(&layouts);
    }
}

/// The buckets of row counts up to that of `most`.
fn buckets(most: usize) -> impl Iterator<Item = usize> {
    let last = m_bucket(most);
    successors(Some(m_bucket(LEAST)), |m| Some(m_bucket(m + 1))).take_while(move |m| *m <= last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_count_has_a_bucket() {
        let all: Vec<usize> = buckets(4096).collect();
        assert!((LEAST..=4096).all(|m| all.contains(&m_bucket(m))));
        assert_eq!((all[0], all.len(), all.last()), (144, 40, Some(&4096)));
    }
}
