//! Describes a checkpoint directory by its headers, without loading weights.

mod header;

use crate::config::Config;
use crate::inventory::{Entry, inventory, weight_bytes};
pub use header::{HeaderError, Stored, parse_header};
use pegainfer_runtime::ConfigError;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use thiserror::Error;

/// Names of the same kind that are printed.
const SHOWN: usize = 10;

/// Why a directory cannot be inspected.
#[derive(Debug, Error)]
pub enum InspectError {
    /// config.json.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A header.
    #[error(transparent)]
    Header(#[from] HeaderError),
}

/// Tensors of one dtype.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kind {
    /// Dtype as named in the files.
    pub dtype: String,
    /// Number of tensors.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Description of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Files with headers.
    pub files: usize,
    /// Files that end before the last tensor that they announce.
    pub truncated: Vec<String>,
    /// Tensors by dtype.
    pub kinds: Vec<Kind>,
    /// Number and bytes of tensors of draft layers, which are not loaded.
    pub drafts: (usize, u64),
    /// Tensors that the configuration requires and no file has.
    pub missing: Vec<String>,
    /// Tensors that the configuration does not know.
    pub unexpected: Vec<String>,
    /// Tensors of another dtype or shape, in words.
    pub mismatched: Vec<String>,
    /// Number and bytes of tensors that the configuration requires.
    pub expected: (usize, u64),
    /// Number of ranks and weight bytes per GPU, for every number of ranks that the model can be split into.
    pub memory: Vec<(usize, u64)>,
}

impl Report {
    /// True if the engine can load the checkpoint.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.mismatched.is_empty() && self.truncated.is_empty()
    }

    /// Number and bytes of all tensors.
    pub fn total(&self) -> (usize, u64) {
        self.kinds.iter().fold((0, 0), |(tensors, bytes), kind| (tensors + kind.tensors, bytes + kind.bytes))
    }
}

/// Reads config.json and every safetensors header of `dir`. Without weights the report lists all required tensors as
/// missing.
pub fn inspect(dir: &Path) -> Result<Report, InspectError> {
    let config = Config::load(dir)?;
    let mut tensors = BTreeMap::new();
    let (mut files, mut truncated) = (0, Vec::new());
    for path in header::files(dir)? {
        let file = header::read(&path)?;
        files += 1;
        if file.bytes_present < file.bytes_announced {
            truncated.push(format!(
                "{} ({} bytes are missing)",
                path.display(),
                file.bytes_announced - file.bytes_present
            ));
        }
        tensors.extend(file.tensors);
    }
    Ok(Report { files, truncated, ..compare(&config, &tensors) })
}

/// Compares headers with the requirements of `config`.
pub fn compare(config: &Config, tensors: &BTreeMap<String, Stored>) -> Report {
    let entries = inventory(config);
    let mut report = Report { expected: (entries.len(), entries.iter().map(Entry::bytes).sum()), ..Report::default() };
    let mut kinds: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for stored in tensors.values() {
        let kind = kinds.entry(&stored.dtype).or_default();
        *kind = (kind.0 + 1, kind.1 + stored.bytes);
    }
    let kind = |(dtype, (tensors, bytes)): (&str, (usize, u64))| Kind { dtype: dtype.to_owned(), tensors, bytes };
    report.kinds = kinds.into_iter().map(kind).collect();
    let known: BTreeMap<&str, &Entry> = entries.iter().map(|entry| (entry.name.as_str(), entry)).collect();
    for entry in &entries {
        match tensors.get(&entry.name) {
            None => report.missing.push(entry.name.clone()),
            Some(stored) if stored.dtype != format!("{:?}", entry.dtype) || stored.shape != entry.shape => {
                let (dtype, shape, name) = (&stored.dtype, &stored.shape, &entry.name);
                let message = format!("{name} is {dtype} {shape:?}, expected {:?} {:?}", entry.dtype, entry.shape);
                report.mismatched.push(message);
            }
            Some(stored) if entry.draft => {
                report.drafts = (report.drafts.0 + 1, report.drafts.1 + stored.bytes);
            }
            Some(_) => {}
        }
    }
    report.unexpected = tensors.keys().filter(|name| !known.contains_key(name.as_str())).cloned().collect();
    let rank = |ranks| weight_bytes(config, ranks).ok().map(|bytes| (ranks, bytes));
    report.memory = [1, 2, 4, 8].into_iter().filter_map(rank).collect();
    report
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tensors, bytes) = self.total();
        writeln!(f, "{} files, {tensors} tensors, {bytes} bytes", self.files)?;
        for Kind { dtype, tensors, bytes } in &self.kinds {
            writeln!(f, "  {dtype:<8} {tensors:>6} tensors {bytes:>16} bytes")?;
        }
        let (expected, expected_bytes) = self.expected;
        writeln!(f, "config.json asks for {expected} tensors, {expected_bytes} bytes")?;
        if self.drafts.0 > 0 {
            writeln!(f, "draft layers, not loaded: {} tensors, {} bytes", self.drafts.0, self.drafts.1)?;
        }
        let problems = [
            ("truncated files", &self.truncated),
            ("missing tensors", &self.missing),
            ("tensors of another dtype or shape", &self.mismatched),
            ("unexpected tensors, ignored", &self.unexpected),
        ];
        for (what, names) in problems.into_iter().filter(|(_, names)| !names.is_empty()) {
            writeln!(f, "{what}: {}", names.len())?;
            for name in names.iter().take(SHOWN) {
                writeln!(f, "  {name}")?;
            }
            if names.len() > SHOWN {
                writeln!(f, "  and {} more", names.len() - SHOWN)?;
            }
        }
        writeln!(f, "weights of one GPU, without KV cache and activations:")?;
        for (ranks, bytes) in &self.memory {
            let gib = *bytes as f64 / f64::from(1 << 30);
            writeln!(f, "  {ranks} ranks: {:.2} GB ({gib:.2} GiB)", *bytes as f64 / 1e9)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{flash, tiny_dir};

    /// Headers of an official checkpoint, as the file has them: names, dtypes, shapes and offsets, no weights.
    fn official(config: &Config) -> BTreeMap<String, Stored> {
        let mut offset = 0;
        let mut json = serde_json::Map::new();
        for entry in inventory(config) {
            let end = offset + entry.bytes();
            let dtype = format!("{:?}", entry.dtype);
            json.insert(
                entry.name,
                serde_json::json!({"dtype": dtype, "shape": entry.shape, "data_offsets": [offset, end]}),
            );
            offset = end;
        }
        parse_header("test", &serde_json::Value::from(json).to_string()).unwrap()
    }

    #[test]
    fn the_official_headers_pass() {
        let config = flash(false);
        let report = compare(&config, &official(&config));
        assert!(report.is_complete() && report.unexpected.is_empty(), "{report}");
        assert_eq!(report.total(), (69_187, 159_609_485_896));
        let text = report.to_string();
        assert!(text.contains("69187 tensors, 159609485896 bytes") && text.contains("8 ranks: 20.6"), "{text}");
    }

    #[test]
    fn a_missing_a_mis_shaped_and_an_unknown_tensor_are_named() {
        let config = flash(false);
        let mut tensors = official(&config);
        let mut moved = tensors.remove("layers.17.ffn.experts.200.w2.scale").unwrap();
        moved.shape = vec![4096, 64];
        tensors.insert("layers.17.ffn.experts.256.w2.scale".to_owned(), moved);
        tensors.get_mut("layers.3.attn.wkv.scale").unwrap().shape = vec![4, 31];
        tensors.get_mut("layers.4.ffn.gate.bias").unwrap().dtype = "BF16".to_owned();
        let report = compare(&config, &tensors);
        assert!(!report.is_complete());
        assert_eq!(report.missing, ["layers.17.ffn.experts.200.w2.scale"]);
        assert_eq!(report.unexpected, ["layers.17.ffn.experts.256.w2.scale"]);
        assert_eq!(
            report.mismatched,
            [
                "layers.3.attn.wkv.scale is F8_E8M0 [4, 31], expected F8_E8M0 [4, 32]",
                "layers.4.ffn.gate.bias is BF16 [256], expected F32 [256]"
            ]
        );
    }

    #[test]
    fn the_bundled_checkpoint_is_whole_and_a_cut_file_is_named() {
        let report = inspect(&tiny_dir()).unwrap();
        assert!(report.is_complete() && report.unexpected.is_empty() && report.files == 1, "{report}");
        let dir = std::env::temp_dir().join(format!("pegainfer-inspect-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::copy(tiny_dir().join("config.json"), dir.join("config.json")).unwrap();
        let empty = inspect(&dir).unwrap();
        assert_eq!((empty.files, empty.missing.len()), (0, report.total().0));
        let bytes = std::fs::read(tiny_dir().join("model.safetensors")).unwrap();
        std::fs::write(dir.join("model.safetensors"), &bytes[..bytes.len() - 100]).unwrap();
        let cut = inspect(&dir).unwrap();
        assert!(!cut.is_complete() && cut.truncated[0].ends_with("(100 bytes are missing)"), "{cut}");
        std::fs::write(dir.join("model.safetensors"), &bytes[..100]).unwrap();
        assert!(inspect(&dir).unwrap_err().to_string().contains("damaged or truncated"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
