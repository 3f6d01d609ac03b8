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
    /// Bytes of host memory for copies of KV blocks, which the engines share in equal parts.
    pub host: Option<u64>,
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

    /// A line with what `bytes` bytes of host memory hold: of a model with state, half of them snapshots.
    fn host_line(&self, f: &mut fmt::Formatter<'_>, bytes: u64) -> fmt::Result {
        let Self { gpu, ranks, .. } = self;
        let has_states = gpu.states > 0;
        let share = bytes / if has_states { 2 } else { 1 };
        let tokens = u128::from(share) * gpu.kv_tokens as u128 / u128::from((gpu.kv * *ranks as u64).max(1));
        write!(f, "{:<16} {:>8.2} GB  copies of {tokens} tokens", "host memory", bytes as f64 / 1e9)?;
        if has_states {
            let snapshots = share / (gpu.states / gpu.sequences.max(1) as u64 * *ranks as u64).max(1);
            write!(f, " and {snapshots} snapshots")?;
        }
        writeln!(f)
    }
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, ranks, engines, host } = self;
        match ranks * engines {
            1 => write!(f, "{gpu}")?,
            gpus => {
                write!(f, "each of {gpus} GPUs\n{gpu}\n")?;
                self.line(f, "each engine", 1)?;
            }
        }
        if *engines > 1 {
            self.line(f, &format!("all {engines} engines"), *engines)?;
        }
        host.map_or(Ok(()), |bytes| self.host_line(f, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::defaults::Defaults;
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
        let alone = Capacity { gpu: one.clone(), ranks: 1, engines: 1, host: None };
        assert_eq!(alone.to_string(), one.to_string());
        let text = Capacity { gpu: half.clone(), ranks: 2, engines: 3, host: None }.to_string();
        assert!(text.starts_with("each of 6 GPUs\nweights"), "{text}");
        let (tokens, sequences) = (half.kv_tokens, half.sequences);
        assert_eq!(numbers(&text, "each engine"), [2, tokens, sequences], "{text}");
        assert_eq!(numbers(&text, "all 3 engines"), [6, 3 * tokens, 3 * sequences], "{text}");
        let all = format!("{:.2} GB  on 6 GPUs", (6 * half.used()) as f64 / 1e9);
        assert!(text.contains(&all), "{all} is not in {text}");
        let pair = Capacity { gpu: half, ranks: 2, engines: 1, host: None }.to_string();
        assert!(pair.contains("each of 2 GPUs") && !pair.contains("all 1"), "{pair}");
    }

    #[test]
    fn host_memory_holds_the_tokens_of_all_ranks() {
        let engine = Defaults::try_parse_from(["plan"]).unwrap().engine;
        for (model, has_states) in [("qwen3-tiny", false), ("qwen35-tiny", true)] {
            let gpu = engine::gpu_fit(&model_dir().with_file_name(model), &engine, 3_000_000_000).unwrap();
            let (kv, tokens) = (gpu.kv, gpu.kv_tokens);
            let twice = if has_states { 4 } else { 2 } * kv;
            let text = Capacity { gpu: gpu.clone(), ranks: 1, engines: 1, host: Some(twice) }.to_string();
            assert_eq!(numbers(&text, "host memory")[0], 2 * tokens, "{text}");
            let text = Capacity { gpu, ranks: 2, engines: 1, host: Some(twice) }.to_string();
            let found = numbers(&text, "host memory");
            assert_eq!((found[0], found.len()), (tokens, if has_states { 2 } else { 1 }), "{text}");
        }
    }
}
