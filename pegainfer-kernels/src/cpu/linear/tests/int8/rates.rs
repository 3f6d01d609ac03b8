//! Rates of the int8 path.

use super::weight::Weight;
use super::{Q4_K, Q6_K, Rng};
use crate::cpu::linear::*;
use pegainfer_core::team::Team;
use std::time::Instant;

/// Run alone, in an optimised build: `cargo test --release -p pegainfer-kernels rates -- --ignored --nocapture`.
#[test]
#[ignore = "prints the rates of this machine"]
fn rates() {
    let mut rng = Rng(1);
    for (format, (n, k)) in [Q4_K, Q6_K].into_iter().flat_map(|f| [(9728, 2560), (2560, 9728)].map(|s| (f, s))) {
        let one = Weight::new(&mut rng, format, 64, k);
        // More than a cache holds.
        let ring: Vec<Weight> = (0..24)
            .map(|_| {
                let repeat = |bytes: &[u8]| bytes.repeat(n / 64);
                Weight { format, codes: repeat(&one.codes), scales: repeat(&one.scales) }
            })
            .collect();
        let bytes = (ring[0].codes.len() + ring[0].scales.len()) as f64;
        for threads in [1, 2] {
            let team = Team::new(threads).unwrap();
            for m in [1, 8, 32, 512] {
                let (x, mut out, mut scratch) = (rng.values(m * k), vec![bf16::ZERO; m * n], Scratch::new());
                let mut best = f64::INFINITY;
                for w in ring.iter().cycle().take(if m == 512 { 4 } else { 120 }) {
                    let start = Instant::now();
                    let out = LinearOut::Bf16(&mut out);
                    team.install(|| {
                        linear_stacked((Isa::best(), Activations::Rounded), &x, &w.parts(), (m, k), out, &mut scratch)
                    });
                    best = best.min(start.elapsed().as_secs_f64());
                }
                let (gb, macs) = (bytes / best / 1e9, (m * n * k) as f64 / best / 1e9);
                println!("{format} [{n},{k}] m {m}, {threads} threads: {gb:.1} GB/s, {macs:.0} G products/s");
            }
        }
    }
}
