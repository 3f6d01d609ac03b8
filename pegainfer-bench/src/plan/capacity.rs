//! Memory and KV cache of all GPUs of `--tensor-parallel-size` and `--data-parallel-size`.

use pegainfer_runtime::GpuFit;
use std::fmt;

/// Use of the memory of several GPUs of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Capacity {
    /// Use of each GPU.
    pub gpu: GpuFit,
    /// GPUs of an engine, which share its model and hold the same tokens.
    pub ranks: usize,
    /// Engines, each with a copy of the weights and a KV cache of its own.
    pub engines: usize,
}

impl Capacity {
    /// A line with the memory and the KV cache of `engines` engines, named `name`.
    fn line(&self, f: &mut fmt::Formatter<'_>, name: &str, engines: usize) -> fmt::Result {
        let Self { gpu, ranks, .. } = self;
        let (gpus, tokens, sequences) = (ranks * engines, gpu.kv_tokens * engines, gpu.sequences * engines);
        let gb = (gpu.used() * gpus as u64) as f64 / 1e9;
        let on = if gpus == 1 { "1 GPU".to_owned() } else { format!("{gpus} GPUs") };
        writeln!(f, "{name:<16} {gb:>8.2} GB  on {on}: KV cache of {tokens} tokens, {sequences} sequences at once")
    }
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, ranks, engines } = self;
        match ranks * engines {
            1 => return write!(f, "{gpu}"),
            gpus => write!(f, "each of {gpus} GPUs\n{gpu}\n")?,
        }
        self.line(f, "each engine", 1)?;
        if *engines > 1 { self.line(f, &format!("all {engines} engines"), *engines) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Defaults;
    use clap::Parser;
    use pegainfer_models::engine;
    use pegainfer_testing::model_dir;

    /// The last numbers of a line: GPUs, tokens and sequences.
    fn numbers(text: &str, name: &str) -> Vec<usize> {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line[name.len()..].split_whitespace().filter_map(|word| word.parse().ok()).collect()
    }

    #[test]
    fn engines_add_up_and_the_ranks_of_one_do_not() {
        let fit = |ranks: &str| {
            let engine = Defaults::try_parse_from(["plan", "--tensor-parallel-size", ranks]).unwrap().engine;
            engine::gpu_fit(&model_dir(), &engine, 3_000_000_000).unwrap()
        };
        let (one, half) = (fit("1"), fit("2"));
        assert!(half.kv_tokens > one.kv_tokens && half.weights < one.weights, "{one:?} {half:?}");
        let alone = Capacity { gpu: one.clone(), ranks: 1, engines: 1 };
        assert_eq!(alone.to_string(), one.to_string());
        let text = Capacity { gpu: half.clone(), ranks: 2, engines: 3 }.to_string();
        assert!(text.starts_with("each of 6 GPUs\nweights"), "{text}");
        let (tokens, sequences) = (half.kv_tokens, half.sequences);
        assert_eq!(numbers(&text, "each engine"), [2, tokens, sequences], "{text}");
        assert_eq!(numbers(&text, "all 3 engines"), [6, 3 * tokens, 3 * sequences], "{text}");
        let all = format!("{:.2} GB  on 6 GPUs", (6 * half.used()) as f64 / 1e9);
        assert!(text.contains(&all), "{all} is not in {text}");
        let pair = Capacity { gpu: half, ranks: 2, engines: 1 }.to_string();
        assert!(pair.contains("each of 2 GPUs") && !pair.contains("all 1"), "{pair}");
    }
}
