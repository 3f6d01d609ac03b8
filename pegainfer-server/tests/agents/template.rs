//! Directories with the bundled tokenizer and one of several chat templates.

use super::scripted::Format;
use super::support::model_dir;
use std::path::{Path, PathBuf};

/// A chat template and the format of calls that it teaches.
pub struct Template {
    name: String,
    format: Format,
    dir: PathBuf,
    /// Removed when the template is dropped.
    temporary: bool,
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl Template {
    /// The bundled template: calls as JSON, system messages anywhere.
    pub fn json() -> Self {
        Self { name: "qwen3-tiny".into(), format: Format::Json, dir: model_dir(), temporary: false }
    }

    /// A template with the demands of Qwen3.5's: tags, a system message only at the beginning, a user's question, arguments
    /// that are objects, reasoning unless it is switched off.
    pub fn tags() -> Self {
        Self::with("tags", Format::Tags, include_str!("../fixtures/agents/tags.jinja"))
    }

    /// The official templates in the directory `PEGAINFER_TEST_TEMPLATES`.
    pub fn official() -> Vec<Self> {
        let dir = std::env::var_os("PEGAINFER_TEST_TEMPLATES").expect("PEGAINFER_TEST_TEMPLATES is not set");
        let files = [
            ("qwen3/qwen3.chat_template.jinja", Format::Json),
            ("qwen3.5/qwen3.5-4B-9B-27B.chat_template.jinja", Format::Tags),
        ];
        let template = |(file, format): (&str, Format)| {
            let name = Path::new(file).file_name().unwrap().to_str().unwrap();
            Self::with(name, format, &std::fs::read_to_string(Path::new(&dir).join(file)).unwrap())
        };
        files.into_iter().map(template).collect()
    }

    fn with(name: &str, format: Format, source: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("pegainfer-agents-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            std::fs::copy(model_dir().join(file), dir.join(file)).unwrap();
        }
        std::fs::write(dir.join("chat_template.jinja"), source).unwrap();
        Self { name: name.into(), format, dir, temporary: true }
    }

    /// Directory of the template and the tokenizer.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Format of the model's calls.
    pub fn format(&self) -> Format {
        self.format
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        if self.temporary {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}
