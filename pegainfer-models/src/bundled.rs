//! The checkpoint inside the executable, served by default.

use anyhow::{Context, Result};
use std::path::Path;
use tempfile::TempDir;

/// Name of the checkpoint.
pub const NAME: &str = "qwen3-tiny";

macro_rules! files {
    ($($name:literal),*) => {
        [$(($name, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/qwen3-tiny/", $name)).as_slice())),*]
    };
}

/// Name and content of each file.
static FILES: [(&str, &[u8]); 6] = files!(
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json"
);

/// Writes the files to the directory [`NAME`] in a new temporary directory, which only this user can read and which is
/// removed when the value is dropped. Loaders read a directory; these 19 MB stay in the page cache.
pub fn write() -> Result<TempDir> {
    let parent = std::env::temp_dir();
    let written = || -> std::io::Result<TempDir> {
        let temporary = tempfile::Builder::new().prefix("pegainfer-").tempdir_in(&parent)?;
        let dir = temporary.path().join(NAME);
        std::fs::create_dir(&dir)?;
        FILES.iter().try_for_each(|(name, bytes)| std::fs::write(dir.join(name), bytes))?;
        Ok(temporary)
    };
    let parent = Path::new(&parent).display();
    written().with_context(|| {
        format!(
            "the bundled {NAME} cannot be written to {parent}: set TMPDIR to a directory with 19 MB, or give --model-path"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing as testing;

    #[test]
    fn the_files_are_those_of_the_repository_and_go_with_the_value() {
        let temporary = write().unwrap();
        let dir = temporary.path().join(NAME);
        let entries = std::fs::read_dir(testing::model_dir()).unwrap().map(|entry| entry.unwrap().file_name());
        let names: Vec<_> = entries.filter(|name| name != "README.md").collect();
        assert_eq!(names.len(), FILES.len(), "{names:?}");
        for name in names {
            let original = std::fs::read(testing::model_dir().join(&name)).unwrap();
            assert!(std::fs::read(dir.join(&name)).unwrap() == original, "{name:?} differs");
        }
        drop(temporary);
        assert!(!dir.exists());
    }
}
