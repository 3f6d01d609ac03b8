//! Writes runs of words to scattered places.

use super::check::Check;
use crate::cuda;
use crate::limits::write_runs::RUN_FIELDS;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out[to + i] = words[from + i]` for `i` below `count`, for each row `(from, to, count)` of `runs`.
///
/// `runs`: `[n, 3]` u32; `words`: `[w]` u32; `out`: u32 of any shape, as a flat list. No two runs write the same
/// element. The op is part of the upload of a step's inputs, like the copies around it, so it is not in the record of a
/// step.
///
/// # Errors
/// On the CPU, a run outside `words` or `out`; a GPU stops with an error.
pub fn write_runs(exec: &mut Exec, runs: &Tensor, words: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("write_runs");
    let n = runs.rows_cols().0;
    check.is(runs, DType::U32, &[n, RUN_FIELDS])?;
    check.is(words, DType::U32, &[words.elements()])?;
    check.that(out.dtype() == DType::U32, "out is not u32")?;
    match exec.device() {
        Device::Cpu(_) => {
            let (words, out) = (words.host::<u32>(), out.host_mut::<u32>());
            for run in runs.host::<u32>().as_chunks().0 {
                let [from, to, count]: [usize; RUN_FIELDS] = run.map(|field| field as usize);
                let pair = words.get(from..from + count).zip(out.get_mut(to..to + count));
                let Some((words, out)) = pair else { return check.that(false, "a run is outside its tensor") };
                out.copy_from_slice(words);
            }
        }
        Device::Cuda if n > 0 => cuda::write_runs(exec, runs, words, out)?,
        Device::Cuda | Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::isa::Isa;
    use pegainfer_core::rng;

    /// `(from, to, count)`.
    type Run = [u32; RUN_FIELDS];

    fn write(exec: &mut Exec, runs: &[Run], words: &[u32], elements: usize) -> Result<Vec<u32>, OpError> {
        let mut out = exec.tensor("out", &[elements], DType::U32).unwrap();
        let mut run_tensor = exec.tensor("runs", &[runs.len(), RUN_FIELDS], DType::U32).unwrap();
        let mut word_tensor = exec.tensor("words", &[words.len()], DType::U32).unwrap();
        exec.fill_rows(&mut run_tensor, runs.as_flattened()).unwrap();
        exec.fill_rows(&mut word_tensor, words).unwrap();
        write_runs(exec, &run_tensor, &word_tensor, &mut out)?;
        let mut written = vec![0; elements];
        exec.read(&out, 0, &mut written)?;
        Ok(written)
    }

    /// Runs of 1 to 700 words with gaps between them, in no order.
    fn scattered() -> (Vec<Run>, Vec<u32>) {
        let (mut to, mut runs, mut words) = (0, Vec::new(), Vec::new());
        for i in 0..300 {
            let draw = rng::bits(3, i);
            let count = if draw.is_multiple_of(16) { 1 + draw as u32 / 16 % 700 } else { 1 };
            to += (draw >> 40) as u32 % 50;
            runs.push([words.len() as u32, to, count]);
            words.extend((0..count).map(|word| rng::bits(i, word.into()) as u32));
            to += count;
        }
        runs.sort_by_key(|[from, ..]| rng::bits(4, u64::from(*from)));
        (runs, words)
    }

    fn every_run_arrives_and_nothing_else_is_written(exec: &mut Exec) {
        let (runs, words) = scattered();
        let elements = 100 + runs.iter().map(|[_, to, count]| to + count).max().unwrap() as usize;
        let mut expected = vec![0; elements];
        for [from, to, count] in runs.iter().map(|run| run.map(|field| field as usize)) {
            expected[to..to + count].copy_from_slice(&words[from..from + count]);
        }
        assert!(write(exec, &runs, &words, elements).unwrap() == expected);
    }

    #[test]
    fn runs_arrive_on_the_cpu() {
        let mut exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
        every_run_arrives_and_nothing_else_is_written(&mut exec);
        for run in [[0, 7, 2], [1, 0, 2]] {
            let error = write(&mut exec, &[run], &[5, 6], 8).unwrap_err();
            assert!(error.message.contains("a run is outside its tensor"), "{error}");
        }
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn runs_arrive_on_a_gpu() {
        every_run_arrives_and_nothing_else_is_written(&mut Exec::cuda(0, Some(1)).unwrap());
    }
}
