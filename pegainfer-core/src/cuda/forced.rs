//! Kernels of older GPUs on a newer one, for tests.

use crate::tensor::OpError;

/// Environment variable read by [`capability`].
const VARIABLE: &str = "PEGAINFER_FORCE_SM";
/// Its values.
const CAPABILITIES: [(&str, (i32, i32)); 4] = [("80", (8, 0)), ("86", (8, 6)), ("89", (8, 9)), ("120", (12, 0))];
/// Bytes of shared memory of a block on the smallest of these GPUs: 99 KB.
const SHARED: usize = 99 << 10;

/// Compute capability that kernels are chosen for, and bytes of shared memory of a block, on a GPU that has `real`.
pub(super) fn capability(real: ((i32, i32), usize)) -> Result<((i32, i32), usize), OpError> {
    let value = std::env::var(VARIABLE).unwrap_or_default();
    let forced = force(&value, real).map_err(|message| OpError { op: "cuda", message })?;
    if !value.is_empty() {
        let (major, minor) = forced.0;
        log::warn!(
            "PEGAINFER_FORCE_SM: kernels for compute capability {major}.{minor} run, which are slower on this GPU"
        );
    }
    Ok(forced)
}

fn force(value: &str, (real, shared): ((i32, i32), usize)) -> Result<((i32, i32), usize), String> {
    if value.is_empty() {
        return Ok((real, shared));
    }
    let Some((_, forced)) = CAPABILITIES.iter().find(|(name, _)| *name == value) else {
        return Err(format!("{VARIABLE} is {value:?}: give 80, 86, 89 or 120, or remove it"));
    };
    // Compute capability 9.0 has all instructions of the kernels for 12.0.
    let runs = *forced <= real || real.0 >= 9;
    if !runs {
        return Err(format!("{VARIABLE} is {value}, but this GPU has {}.{}: give less, or remove it", real.0, real.1));
    }
    Ok((*forced, shared.min(SHARED)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_stands_in_for_an_older_one() {
        let (h200, l4) = (((9, 0), 227 << 10), ((8, 9), 99 << 10));
        assert_eq!(force("", h200), Ok(h200));
        assert_eq!(force("80", h200), Ok(((8, 0), 99 << 10)));
        assert_eq!(force("120", h200), Ok(((12, 0), 99 << 10)));
        assert_eq!(force("86", l4), Ok(((8, 6), 99 << 10)));
        assert!(force("120", l4).is_err_and(|message| message.contains("has 8.9")));
        assert!(force("90", h200).is_err_and(|message| message.contains("give 80, 86, 89 or 120")));
    }
}
