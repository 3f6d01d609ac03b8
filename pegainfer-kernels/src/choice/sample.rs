//! Sampling and log-probabilities.

use super::{Architecture, Gpu};

/// Number of blocks per row of logits, which form a cluster. With few rows the whole GPU shares them; with many, small
/// clusters waste less of it.
pub fn sample_cluster(gpu: &Gpu, rows: usize) -> usize {
    use Architecture::{Ada, Ampere, AmpereGeForce};
    match gpu.architecture {
        // No clusters.
        Ampere | AmpereGeForce | Ada => 1,
        // More than 8 blocks need large groups of multiprocessors, which data-centre GPUs have.
        _ if gpu.is_data_centre() && 16 * rows <= gpu.multiprocessors => 16,
        _ if 8 * rows <= gpu.multiprocessors => 8,
        _ => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_fit_the_gpu() {
        let of = |name: &str, rows: &[usize]| {
            let gpu = Gpu::named(name).unwrap();
            rows.iter().map(|rows| sample_cluster(&gpu, *rows)).collect::<Vec<_>>()
        };
        assert_eq!(of("H200", &[1, 8, 9, 16, 17, 128]), [16, 16, 8, 8, 4, 4]);
        assert_eq!(of("A100", &[1, 8, 128]), [1, 1, 1]);
        assert_eq!(of("RTX 5090", &[1]), [8]);
    }
}
