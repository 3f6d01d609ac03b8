//! Checks that a model fits the memory of a device, and sets the default number of sequences.

use pegainfer_core::kv::DeviceMemory;

/// Divisor of the memory left for sequences: by default their states take at most this part, and the KV cache takes the
/// rest.
const STATES_DIVISOR: u64 = 2;

/// Memory that a model needs on a device, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Demand {
    /// Weights.
    pub weights: u64,
    /// The activations of the largest step.
    pub workspace: u64,
    /// State snapshots.
    pub snapshots: u64,
    /// Recurrent state of one sequence; 0 for a model that keeps everything in the KV cache.
    pub state: u64,
    /// The KV cache, at least.
    pub kv: u64,
}

impl Demand {
    /// Number of running sequences within `budget` bytes: `requested`, or up to `max_rows` whose states take half of
    /// the memory left for sequences. If they do not fit, a sentence for the user.
    pub(super) fn rows(&self, requested: Option<usize>, max_rows: usize, budget: u64) -> Result<usize, String> {
        let left = self.left(budget);
        let fitting =
            (left / STATES_DIVISOR).checked_div(self.state).map_or(max_rows, |rows| rows.min(max_rows as u64) as usize);
        let rows = requested.unwrap_or(fitting.max(1));
        let missing = self.bytes(rows).saturating_sub(budget);
        if missing == 0 {
            return Ok(rows);
        }
        let max_rows = left.saturating_sub(self.kv).checked_div(self.state).unwrap_or(0);
        Err(match max_rows {
            0 => {
                format!("{:.1} GB are missing; choose a smaller model or a device with more memory", gigabytes(missing))
            }
            most => format!("{:.1} GB are missing; --max-num-seqs may be at most {most}", gigabytes(missing)),
        })
    }

    /// Part of `budget` bytes for sequences: their states and the KV cache.
    pub(super) fn left(&self, budget: u64) -> u64 {
        budget.saturating_sub(self.weights + self.workspace + self.snapshots)
    }

    /// Bytes with the states of `rows` sequences.
    fn bytes(&self, rows: usize) -> u64 {
        self.weights + self.workspace + self.snapshots + self.state * rows as u64 + self.kv
    }

    /// Sentence that explains why the model does not fit: needed memory, available memory, and `cause` of
    /// [`Demand::rows`].
    pub(super) fn refusal(&self, memory: DeviceMemory, share: f64, cause: &str) -> String {
        let mut parts = vec![
            format!("{:.1} GB for its weights", gigabytes(self.weights)),
            format!("{:.1} GB for a step (--max-num-batched-tokens)", gigabytes(self.workspace)),
        ];
        if self.state > 0 {
            parts.push(format!("{:.1} GB for state snapshots (--state-cache-memory)", gigabytes(self.snapshots)));
            parts.push(format!("{:.3} GB for the state of each sequence", gigabytes(self.state)));
        }
        format!(
            "the model does not fit the GPU: it takes {} and the KV cache, but --gpu-memory-utilization {share} leaves {:.1} GB of \
             the GPU's {:.1} GB, {:.1} GB of which other programs use: {cause}",
            parts.join(", "),
            gigabytes(memory.left_of(share)),
            gigabytes(memory.total),
            gigabytes(memory.total - memory.free.min(memory.total)),
        )
    }
}

fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;
    /// Qwen3.5-4B on a GPU of 24 GB.
    const HYBRID: Demand =
        Demand { weights: 8_410_000_000, workspace: 2 * GB, snapshots: 1_200_000_000, state: 51_500_000, kv: GB / 10 };

    #[test]
    fn states_take_half_of_what_is_left_and_never_more_than_the_default() {
        assert_eq!(HYBRID.rows(None, 256, 126 * GB), Ok(256), "on an H200");
        assert_eq!(HYBRID.rows(None, 256, 21_600_000_000), Ok(96), "(21.6 - 11.61) / 2 / 0.0515");
        assert_eq!(HYBRID.rows(None, 256, 12_200_000_000), Ok(5));
        assert_eq!(HYBRID.rows(Some(7), 256, 126 * GB), Ok(7));
        assert_eq!(Demand { state: 0, ..HYBRID }.rows(None, 256, 13 * GB), Ok(256), "all of its memory is KV blocks");
    }

    #[test]
    fn a_refusal_says_how_much_is_missing_and_what_fits() {
        let error = HYBRID.rows(None, 256, 10 * GB).unwrap_err();
        assert!(error.contains("1.8 GB are missing; choose a smaller model"), "{error}");
        let error = HYBRID.rows(Some(256), 256, 21_600_000_000).unwrap_err();
        assert!(error.contains("3.3 GB are missing; --max-num-seqs may be at most 192"), "{error}");
        assert_eq!(HYBRID.rows(Some(192), 256, 21_600_000_000), Ok(192));
        let memory = DeviceMemory { total: 24 * GB, free: 23 * GB };
        let text = HYBRID.refusal(memory, 0.9, "x");
        assert!(
            text.contains("0.9 leaves 20.6 GB of the GPU's 24.0 GB, 1.0 GB of which other programs use: x"),
            "{text}"
        );
    }
}
