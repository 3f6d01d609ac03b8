//! Directories with the bundled tokenizer and one of several chat templates.

use super::scripted::Format;
use crate::support::model_dir;
use std::path::{Path, PathBuf};

/// A chat template and its format of calls.
pub struct Template {
    name: String,
    format: Format,
    dir: PathBuf,
    /// True if the directory is removed when the template is dropped.
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

    /// A template with Qwen3.5's requirements: tags, a system message only at the beginning, a user's question,
    /// arguments that are objects, reasoning unless it is switched off.
    pub fn tags() -> Self {
        Self::with("tags", Format::Tags, include_str!("../../fixtures/agents/tags.jinja"))
    }

    /// [`tags`](Self::tags) with Qwen3.8's additional requirements: three levels of reasoning, which stays in the
    /// prompt.
    pub fn effort() -> Self {
        let source = concat!(
            include_str!("../../fixtures/agents/effort.jinja"),
            include_str!("../../fixtures/agents/tags.jinja")
        );
        Self::with("effort", Format::Tags, source)
    }

    /// DeepSeek-V4's own format, which the program recognises by the model type.
    pub fn dsml() -> Self {
        let template = Self::with("dsml", Format::Tags, "");
        for file in ["chat_template.jinja", "tokenizer_config.json"] {
            std::fs::remove_file(template.dir.join(file)).unwrap();
        }
        std::fs::write(template.dir.join("config.json"), "{\"model_type\": \"deepseek_v4\"}").unwrap();
        template
    }

    /// The templates `*.jinja` in the directories of `PEGAINFER_TEST_TEMPLATES`, such as those of the official
    /// checkpoints.
    pub fn official() -> Vec<Self> {
        let dir = std::env::var_os("PEGAINFER_TEST_TEMPLATES").expect("PEGAINFER_TEST_TEMPLATES is not set");
        let entries =
            |dir: &Path| std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
        let families = entries(Path::new(&dir)).into_iter().filter(|path| path.is_dir());
        let files = families.flat_map(|family| entries(&family));
        let template = |file: PathBuf| {
            let source = std::fs::read_to_string(&file).unwrap();
            let format = if source.contains("<function=") { Format::Tags } else { Format::Json };
            Self::with(file.file_name().unwrap().to_str().unwrap(), format, &source)
        };
        let templates: Vec<Self> =
            files.filter(|file| file.extension().is_some_and(|extension| extension == "jinja")).map(template).collect();
        assert!(!templates.is_empty(), "no *.jinja in the directories of {}", Path::new(&dir).display());
        templates
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
