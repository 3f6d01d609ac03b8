//! Models in GGUF in a repository, which usually holds one in each of many quantisations.

use super::listing::is_file_name;
use super::source::MAIN;
use pegainfer_model_files::gguf::{is_model, model_name, shard_names};
use std::path::Path;

/// Separators between the parts of a file's name.
const SEPARATORS: [char; 3] = ['-', '.', '_'];
/// Maximum number of names in a message.
const SHOWN: usize = 20;

/// An id with revision and quantisation, `organisation/name@REVISION:Q4_K_M`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ModelId<'a> {
    /// `organisation/name`.
    pub repo: &'a str,
    /// Branch, tag or commit.
    pub revision: &'a str,
    /// End of the name of a GGUF file, without its extension.
    pub quantization: Option<&'a str>,
}

impl<'a> ModelId<'a> {
    pub(super) fn parse(id: &'a str) -> Self {
        let (id, quantization) = id.split_once(':').map_or((id, None), |(id, end)| (id, Some(end)));
        let (repo, revision) = id.split_once('@').unwrap_or((id, MAIN));
        Self { repo, revision, quantization }
    }
}

/// Paths of the shards of the only model of the quantisation among the files of a repository.
///
/// # Errors
/// A clause that says which models there are.
pub(super) fn choose<'a>(files: impl Iterator<Item = &'a str>, quantization: &str) -> Result<Vec<String>, String> {
    let models: Vec<&str> = files.filter(|path| is_gguf(path)).collect();
    let exact: Vec<&str> =
        models.iter().copied().filter(|path| stem(path).eq_ignore_ascii_case(quantization)).collect();
    let matching = models.iter().copied().filter(|path| ends_with(stem(path), quantization));
    let matching = if exact.is_empty() { matching.collect() } else { exact };
    match matching.as_slice() {
        [path] => Ok(shards(path)),
        [] if models.is_empty() => Err("it has no GGUF file of a model".to_owned()),
        [] => Err(format!("it has no GGUF file {quantization}, but {}", names(&models))),
        several => Err(format!("{quantization} may be each of {}; give more of the name", names(several))),
    }
}

/// Names of the models in GGUF among the files of a repository, for a message; `None` if there is none.
pub(super) fn list<'a>(files: impl Iterator<Item = &'a str>) -> Option<String> {
    let models: Vec<&str> = files.filter(|path| is_gguf(path)).collect();
    (!models.is_empty()).then(|| names(&models))
}

/// Paths of the GGUF files in a directory and its folders, relative to it.
pub(super) fn files(dir: &Path) -> Vec<String> {
    let names = |dir: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    let mut files = Vec::new();
    for name in names(dir) {
        if name.ends_with(".gguf") {
            files.push(name);
        } else if dir.join(&name).is_dir() {
            let within = names(&dir.join(&name)).into_iter().filter(|file| file.ends_with(".gguf"));
            files.extend(within.map(|file| format!("{name}/{file}")));
        }
    }
    files
}

/// True for the path of a model or of its first shard. Paths lead to files of the repository and of its folders only.
fn is_gguf(path: &str) -> bool {
    path.split('/').all(is_file_name) && is_model(path.rsplit('/').next().unwrap_or(path))
}

/// Paths of all shards of a model.
fn shards(path: &str) -> Vec<String> {
    let (folder, name) = path.rsplit_once('/').map_or(("", path), |(folder, name)| (folder, name));
    let join = |name: String| if folder.is_empty() { name } else { format!("{folder}/{name}") };
    shard_names(name).into_iter().map(join).collect()
}

/// Name of a model: of its file, without number of shards and extension.
fn stem(path: &str) -> &str {
    model_name(path.rsplit('/').next().unwrap_or(path))
}

/// True if `end` is the last part or parts of a name, in any case.
fn ends_with(stem: &str, end: &str) -> bool {
    let Some(at) = stem.len().checked_sub(end.len()).filter(|at| !end.is_empty() && stem.is_char_boundary(*at)) else {
        return false;
    };
    stem[at..].eq_ignore_ascii_case(end) && stem[..at].ends_with(SEPARATORS)
}

fn names(paths: &[&str]) -> String {
    let shown: Vec<&str> = paths.iter().take(SHOWN).map(|path| stem(path)).collect();
    let more = paths.len().saturating_sub(SHOWN);
    if more > 0 { format!("{} and {more} more", shown.join(", ")) } else { shown.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [&str; 9] = [
        "README.md",
        "Qwen3-8B-Q4_K_M.gguf",
        "Qwen3-8B-Q8_0.gguf",
        "Qwen3-8B-UD-Q4_K_XL.gguf",
        "BF16/Qwen3-8B-BF16-00001-of-00002.gguf",
        "BF16/Qwen3-8B-BF16-00002-of-00002.gguf",
        "mmproj-BF16.gguf",
        "imatrix_unsloth.gguf",
        "../Qwen3-8B-Q5_K_M.gguf",
    ];

    #[test]
    fn the_quantisation_is_the_end_of_a_name() {
        let choose = |quantization: &str| choose(FILES.into_iter(), quantization);
        for (quantization, name) in [
            ("Q4_K_M", "Qwen3-8B-Q4_K_M.gguf"),
            ("q8_0", "Qwen3-8B-Q8_0.gguf"),
            ("UD-Q4_K_XL", "Qwen3-8B-UD-Q4_K_XL.gguf"),
            ("Q4_K_XL", "Qwen3-8B-UD-Q4_K_XL.gguf"),
            ("Qwen3-8B-Q8_0", "Qwen3-8B-Q8_0.gguf"),
        ] {
            assert_eq!(choose(quantization).unwrap(), [name], "{quantization}");
        }
        let shards = [1, 2].map(|i| format!("BF16/Qwen3-8B-BF16-0000{i}-of-00002.gguf"));
        assert_eq!(choose("BF16").unwrap(), shards);
        for missing in ["Q5_K_M", "K_M.gguf", "", "8B", "_M"] {
            let error = choose(missing).unwrap_err();
            assert!(
                error.contains("but Qwen3-8B-Q4_K_M, Qwen3-8B-Q8_0, Qwen3-8B-UD-Q4_K_XL, Qwen3-8B-BF16"),
                "{error}"
            );
        }
        let both = ["a-Q4_0.gguf", "b-Q4_0.gguf"];
        let error = super::choose(both.into_iter(), "Q4_0").unwrap_err();
        assert!(error.contains("Q4_0 may be each of a-Q4_0, b-Q4_0"), "{error}");
        assert!(super::choose(["x.txt"].into_iter(), "Q4_0").unwrap_err().contains("no GGUF file of a model"));
    }

    #[test]
    fn ids_may_have_a_revision_and_a_quantisation() {
        let id = |revision, quantization| ModelId { repo: "a/b", revision, quantization };
        assert_eq!(ModelId::parse("a/b"), id("main", None));
        assert_eq!(ModelId::parse("a/b:Q4_K_M"), id("main", Some("Q4_K_M")));
        assert_eq!(ModelId::parse("a/b@v1.0"), id("v1.0", None));
        assert_eq!(ModelId::parse("a/b@v1.0:Q4_K_M"), id("v1.0", Some("Q4_K_M")));
    }
}
