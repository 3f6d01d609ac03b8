//! Number of devices that a model needs.

/// Memory that a device needs for a given number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankBytes {
    /// Number of ranks.
    pub ranks: usize,
    /// Bytes on the device of the rank that needs the most.
    pub bytes: u64,
}

/// The smallest number of ranks whose devices hold the model. `needs` lists the possible numbers in ascending order,
/// `free` the free memory of each device; the first devices are used. If none fits, a sentence for the user with the
/// needed and the free memory.
pub fn fewest_ranks(needs: &[RankBytes], free: &[u64]) -> Result<usize, String> {
    let fits =
        |need: &&RankBytes| need.ranks <= free.len() && free[..need.ranks].iter().all(|free| *free >= need.bytes);
    if let Some(need) = needs.iter().find(fits) {
        return Ok(need.ranks);
    }
    let least = free.iter().copied().min().unwrap_or(0);
    let table: Vec<String> = needs
        .iter()
        .map(|RankBytes { ranks, bytes }| format!("{} with {ranks} rank{}", gigabytes(*bytes), plural(*ranks)))
        .collect();
    let remedy = match (needs.iter().find(|need| need.bytes <= least), needs.last()) {
        (Some(need), _) => format!("{} such GPUs hold it", need.ranks),
        (None, Some(last)) => format!(
            "it takes {} GPU{} with {} free each, or less with lower --kv-cache-memory, --max-num-seqs and \
             --max-num-batched-tokens",
            last.ranks,
            plural(last.ranks),
            gigabytes(last.bytes)
        ),
        (None, None) => "it runs on the CPU only".to_owned(),
    };
    Err(format!(
        "the model does not fit: a GPU needs {}, and {} is free on {}: {remedy}; --device cpu runs it on the CPU",
        table.join(", "),
        gigabytes(least),
        if free.len() == 1 { "the one GPU".to_owned() } else { format!("each of {} GPUs", free.len()) },
    ))
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

fn plural(n: usize) -> &'static str {
    if n == 1 { "" } else { "s" }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;
    const NEEDS: [RankBytes; 4] = [
        RankBytes { ranks: 1, bytes: 160 * GB },
        RankBytes { ranks: 2, bytes: 85 * GB },
        RankBytes { ranks: 4, bytes: 45 * GB },
        RankBytes { ranks: 8, bytes: 27 * GB },
    ];

    #[test]
    fn the_fewest_devices_that_hold_the_model_are_taken() {
        for (free, expected) in [
            (vec![200 * GB; 8], 1),
            (vec![160 * GB], 1),
            (vec![141 * GB; 8], 2),
            (vec![80 * GB; 8], 4),
            (vec![80 * GB; 4], 4),
            // Three cannot share it, and the second has other work.
            (vec![90 * GB, 50 * GB, 90 * GB, 90 * GB], 4),
            (vec![30 * GB; 8], 8),
        ] {
            assert_eq!(fewest_ranks(&NEEDS, &free), Ok(expected), "{free:?}");
        }
    }

    #[test]
    fn a_refusal_has_the_numbers_and_what_would_do() {
        let one = fewest_ranks(&NEEDS, &[141 * GB]).unwrap_err();
        let table = "160.0 GB with 1 rank, 85.0 GB with 2 ranks, 45.0 GB with 4 ranks, 27.0 GB with 8 ranks";
        assert!(one.contains(table) && one.contains("141.0 GB is free on the one GPU: 2 such GPUs hold it"), "{one}");
        let three = fewest_ranks(&NEEDS, &[80 * GB; 3]).unwrap_err();
        assert!(three.contains("80.0 GB is free on each of 3 GPUs: 4 such GPUs hold it"), "{three}");
        let small = fewest_ranks(&NEEDS, &[24 * GB; 8]).unwrap_err();
        assert!(
            small.contains("it takes 8 GPUs with 27.0 GB free each, or less with lower --kv-cache-memory"),
            "{small}"
        );
    }
}
