//! Compares the weights of a model with the memory of the devices that would hold them, before they are downloaded.

use crate::args::{EngineArgs, QuantizationArg};
use crate::engine::{chosen_gpus, weight_bytes};
use crate::model_dir;
use anyhow::{Context, Result};
use pegainfer_core::{cuda, host_memory};
use pegainfer_runtime::Overrides;
use std::path::Path;

/// Memory for the weights of one engine.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightMemory {
    /// Bytes that weights can take at most.
    pub bytes: u64,
    /// Name of the memory in messages, such as `this machine's 16.8 GB of memory`.
    pub name: String,
    /// The part of `bytes` that models may take with their KV caches.
    share: f64,
}

/// The part of a machine's memory that models may take.
const HOST_SHARE: f64 = 0.9;

impl WeightMemory {
    /// The memory of the devices that the flags choose: of the GPUs of one engine, or of this machine. `None` if the
    /// system does not say.
    pub fn chosen(args: &EngineArgs) -> Result<Option<Self>> {
        let engines = args.data_parallel_size.get();
        let Some(gpus) = chosen_gpus(&args.device)? else {
            let total = host_memory::total();
            return Ok(total.map(|total| Self::host(total, engines)));
        };
        let ranks = args.tensor_parallel_size.map_or((gpus.len() / engines).max(1), Into::into);
        let limit = args.gpu_memory_limit.unwrap_or(u64::MAX);
        let each = gpus.iter().take(ranks).map(|gpu| Ok(cuda::device_memory(*gpu)?.min(limit)));
        let each: Vec<u64> = each.collect::<Result<_>>().context("the memory of a GPU is unknown")?;
        Ok(Some(Self::gpus(&each, args.gpu_memory_utilization)))
    }

    /// The memory of this machine, of which each of several engines takes a copy of the weights.
    fn host(total: u64, engines: usize) -> Self {
        let name = format!("this machine's {:.1} GB of memory", total as f64 / 1e9);
        Self { bytes: total / engines as u64, name, share: HOST_SHARE }
    }

    /// The usable part of the memory of GPUs that share a model.
    fn gpus(each: &[u64], utilization: f64) -> Self {
        let total = each.iter().sum::<u64>() as f64;
        let of = if each.len() == 1 { "the GPU's".to_owned() } else { format!("the {} GPUs'", each.len()) };
        let name = format!("{of} {:.1} GB of memory, of which --gpu-memory-utilization is {utilization}", total / 1e9);
        Self { bytes: (total * utilization) as u64, name, share: 1.0 }
    }

    /// Bytes that all models together may take by default, with their KV caches: the usable part of GPUs, or nine tenths
    /// of a machine's memory.
    pub fn for_models(&self) -> u64 {
        (self.bytes as f64 * self.share) as u64
    }

    /// A clause about the models that fit.
    pub fn capacity(&self) -> String {
        let most = self.bytes as f64 / 1e9;
        format!(
            "weights of up to {most:.1} GB fit, which is a model of about {} parameters in bf16, {} in 4 bits",
            parameters(most / 2.0),
            parameters(most / 0.57)
        )
    }

    /// Says why a model with this text of config.json and `bytes` bytes of files does not fit, and what would.
    ///
    /// # Errors
    /// A clause for the user.
    pub fn check(&self, config: &str, bytes: u64, overrides: &Overrides) -> Result<(), String> {
        let Some(needs) = Needs::new(config, bytes, overrides).filter(|needs| needs.bytes > self.bytes) else {
            return Ok(());
        };
        let gb = |bytes: u64| bytes as f64 / 1e9;
        let needed = gb(needs.bytes);
        let fits = match needs.smaller.iter().find(|(_, bytes)| *bytes <= self.bytes) {
            Some((flag, bytes)) => format!("with --quantization {flag} they take {:.1} GB and fit", gb(*bytes)),
            None => self.capacity(),
        };
        Err(format!("its weights take {needed:.1} GB, more than fits {}; {fits}", self.name))
    }
}

/// Memory that the weights of a model take.
struct Needs {
    bytes: u64,
    /// Bytes after rounding at load, by value of `--quantization`, largest first.
    smaller: Vec<(&'static str, u64)>,
}

impl Needs {
    /// `None` if the family of the model is unknown or its memory cannot be computed.
    fn new(config: &str, files: u64, overrides: &Overrides) -> Option<Self> {
        let config = serde_json::from_str(config).ok()?;
        let dir = model_dir::from_config(&config, "").ok()?;
        // Formats that only other files describe make the weights smaller than config.json says.
        let bytes = weight_bytes(&dir.dir, overrides).ok()?.min(files);
        Some(Self { bytes, smaller: if overrides.quantization.is_none() { rounded(&dir.dir, bytes) } else { vec![] } })
    }
}

/// Bytes of the weights with each `--quantization` that makes them smaller than `bytes`.
fn rounded(dir: &Path, bytes: u64) -> Vec<(&'static str, u64)> {
    [("fp8", QuantizationArg::Fp8), ("int4", QuantizationArg::Int4)]
        .into_iter()
        .filter_map(|(name, format)| {
            let overrides = Overrides { quantization: Some(format.at_load()), ..Overrides::default() };
            Some((name, weight_bytes(dir, &overrides).ok()?)).filter(|(_, rounded)| *rounded < bytes)
        })
        .collect()
}

/// Billions of parameters in words.
fn parameters(billions: f64) -> String {
    if billions < 10.0 { format!("{billions:.1} billion") } else { format!("{billions:.0} billion") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Qwen3-8B.
    fn config() -> Value {
        json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151_936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
            "tie_word_embeddings": false, "hidden_act": "silu", "attention_bias": false, "torch_dtype": "bfloat16",
            "bos_token_id": 151_643, "eos_token_id": 151_645
        })
    }

    fn refusal(gigabytes: f64, bytes: u64, overrides: &Overrides) -> Option<String> {
        let memory = WeightMemory::gpus(&[(gigabytes * 1e9) as u64], 0.9);
        memory.check(&config().to_string(), bytes, overrides).err()
    }

    #[test]
    fn one_model_may_take_all_that_is_usable_of_a_gpu() {
        // Its KV cache fills --gpu-memory-utilization.
        let memory = WeightMemory::gpus(&[150_000_000_000], 0.9);
        assert_eq!((memory.bytes, memory.for_models()), (135_000_000_000, 135_000_000_000));
        assert_eq!(WeightMemory::host(10_000, 1).for_models(), 9_000);
    }

    #[test]
    fn a_refusal_names_what_fits() {
        let (none, files) = (Overrides::default(), 16_381_000_000);
        assert_eq!(refusal(24.0, files, &none), None);
        let error = refusal(16.0, files, &none).unwrap();
        let expected = "its weights take 16.4 GB, more than fits the GPU's 16.0 GB of memory, of which \
            --gpu-memory-utilization is 0.9; with --quantization fp8 they take 9.4 GB and fit";
        assert_eq!(error, expected);
        assert!(refusal(8.0, files, &none).unwrap().contains("with --quantization int4 they take "));
        let error = refusal(4.0, files, &none).unwrap();
        let expected = "; weights of up to 3.6 GB fit, which is a model of about 1.8 billion parameters in bf16, 6.3 billion in \
            4 bits";
        assert!(error.ends_with(expected), "{error}");
        let fp8 = Overrides { quantization: Some(QuantizationArg::Fp8.at_load()), ..Overrides::default() };
        assert_eq!(refusal(16.0, files, &fp8), None);
        assert!(refusal(8.0, files, &fp8).unwrap().starts_with("its weights take 9.4 GB"));
        // The files are smaller: their format is described elsewhere.
        assert_eq!(refusal(8.0, 6_000_000_000, &none), None);
        // A model of an unknown family is refused elsewhere.
        assert_eq!(WeightMemory::host(1, 1).check("{}", 1 << 40, &none), Ok(()));
    }

    #[test]
    fn engines_and_gpus_count() {
        assert_eq!(WeightMemory::host(32_000_000_000, 2).bytes, 16_000_000_000);
        let two = WeightMemory::gpus(&[24_000_000_000, 24_000_000_000], 0.9);
        assert_eq!(two.bytes, 43_200_000_000);
        assert!(two.name.starts_with("the 2 GPUs' 48.0 GB of memory"), "{}", two.name);
    }
}
