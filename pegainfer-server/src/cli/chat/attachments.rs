//! Images that go with the next message: read from files, and sent as data URLs.

use crate::cli::local_server::LocalServer;
use crate::limits::ImageFlags;
use anyhow::{Context as _, Result};
use axum::body::to_bytes;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pegainfer_images::{Format, Header, ImageError, probe};
use serde::Deserialize;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

/// Maximum bytes of the list of models.
const MAX_RESPONSE: usize = 1 << 24;
/// A model that reads images, for advice.
const EXAMPLE: &str = "pegainfer chat Qwen/Qwen3.5-4B";

/// An image of the next message.
#[derive(Debug, Clone)]
pub(super) struct Attachment {
    name: String,
    header: Header,
    /// Size of the file in bytes.
    bytes: usize,
    /// The file as a data URL.
    pub(super) url: Arc<str>,
}

impl Attachment {
    /// Reads an image, whose format and size are checked. The error is a sentence for the user.
    pub(super) fn read(path: &Path, flags: &ImageFlags) -> Result<Self, String> {
        let name = path.file_name().map_or_else(|| path.display().to_string(), |name| name.display().to_string());
        let bytes = read_file(path, flags).map_err(|error| format!("error: {}: {error}", path.display()))?;
        let header = probe(&bytes, &flags.of_image()).map_err(|error| format!("error: {}: {error}", path.display()))?;
        let media_type = match header.format {
            Format::Png => "image/png",
            Format::Jpeg => "image/jpeg",
            Format::WebP => "image/webp",
            Format::Gif => "image/gif",
        };
        let url = format!("data:{media_type};base64,{}", STANDARD.encode(&bytes)).into();
        Ok(Self { name, header, bytes: bytes.len(), url })
    }
}

/// The bytes of a file, of which one too many is not read.
fn read_file(path: &Path, flags: &ImageFlags) -> Result<Vec<u8>, String> {
    let max = flags.of_image().max_bytes;
    let read = || {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        let (mut bytes, limit) = (Vec::new(), max as u64 + 1);
        // A pipe may never end, and the user would wait for it.
        if metadata.is_file() && metadata.len() < limit {
            file.take(limit).read_to_end(&mut bytes)?;
        }
        std::io::Result::Ok((metadata, bytes))
    };
    match read().map_err(|error| format!("the file cannot be read: {error}"))? {
        (metadata, _) if !metadata.is_file() => Err("this is not a file; name a PNG, JPEG, WebP or GIF file".into()),
        (metadata, bytes) if metadata.len() > max as u64 || bytes.len() > max => {
            Err(ImageError::TooManyBytes { max }.to_string())
        }
        (_, bytes) => Ok(bytes),
    }
}

/// The images of the next message.
#[derive(Debug, Default)]
pub(super) struct Attachments(Vec<Attachment>);

impl Attachments {
    /// Attaches an image, if a conversation with `sent` images may have one more. Returns what to tell the user.
    pub(super) fn attach(&mut self, path: &Path, sent: usize, flags: &ImageFlags) -> String {
        let max = flags.max_images.get();
        if sent + self.0.len() >= max {
            return format!("error: a conversation has at most {max} images; /reset starts another one");
        }
        match Attachment::read(path, flags) {
            Ok(image) => {
                let told = format!("{} goes with the next message", describe(&image));
                self.0.push(image);
                told
            }
            Err(error) => error,
        }
    }

    /// What is attached, for the user.
    pub(super) fn list(&self) -> String {
        if self.0.is_empty() {
            return "no image is attached; /image FILE attaches one to the next message".to_owned();
        }
        let lines: Vec<String> = self.0.iter().map(describe).collect();
        format!("{}\n{} with the next message; /reset removes attached images", lines.join("\n"), goes(lines.len()))
    }

    /// The images, which are no longer attached.
    pub(super) fn take(&mut self) -> Vec<Attachment> {
        std::mem::take(&mut self.0)
    }
}

fn goes(images: usize) -> &'static str {
    if images == 1 { "this image goes" } else { "these images go" }
}

fn describe(image: &Attachment) -> String {
    let Attachment { name, header: Header { format, width, height, .. }, bytes, .. } = image;
    format!("{name} ({format}, {width} x {height} pixels, {} KB)", bytes.div_ceil(1000))
}

/// A model in the list of the API.
#[derive(Deserialize)]
struct Model {
    id: String,
    /// `None` before the model was loaded once.
    input_modalities: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<Model>,
}

impl Model {
    /// True if the model reads images; `None` if that is not known yet.
    fn reads_images(&self) -> Option<bool> {
        Some(self.input_modalities.as_ref()?.iter().any(|input| input == "image"))
    }
}

/// Why the model of this name, by default the first one, takes no images, with advice; `None` if it takes some.
pub(super) async fn refusal(server: &LocalServer, model: Option<&str>) -> Result<Option<String>> {
    let response = server.get("/v1/models").await?;
    let body = to_bytes(response.into_body(), MAX_RESPONSE).await.context("the models cannot be listed")?;
    let ModelList { data } = serde_json::from_slice(&body).context("the models cannot be listed")?;
    Ok(refusal_of(&data, model.unwrap_or(&server.name)))
}

fn refusal_of(models: &[Model], name: &str) -> Option<String> {
    let model = models.iter().find(|model| model.id == name)?;
    if model.reads_images() != Some(false) {
        return None;
    }
    let reader = models.iter().find(|model| model.reads_images() == Some(true));
    Some(match reader {
        Some(Model { id, .. }) => format!("error: {name} reads only text; /model {id} asks a model that reads images"),
        None => format!("error: {name} reads only text; start a model that reads images, such as {EXAMPLE}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Limits;
    use std::path::PathBuf;

    fn fixture(file: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../pegainfer-images/tests/fixtures/sources").join(file)
    }

    #[test]
    fn images_are_attached_listed_and_taken() {
        let (mut attached, flags) = (Attachments::default(), Limits::default().images);
        assert!(attached.list().starts_with("no image is attached; /image FILE"));
        let told = attached.attach(&fixture("small.png"), 0, &flags);
        assert!(told.starts_with("small.png (PNG, ") && told.ends_with(" KB) goes with the next message"), "{told}");
        assert!(attached.list().contains("\nthis image goes with"), "{}", attached.list());
        attached.attach(&fixture("photo.jpg"), 0, &flags);
        let list = attached.list();
        assert!(list.contains("\nphoto.jpg (JPEG, ") && list.contains("\nthese images go with"), "{list}");
        let full = attached.attach(&fixture("small.png"), flags.max_images.get() - 2, &flags);
        assert_eq!(full, "error: a conversation has at most 64 images; /reset starts another one");
        let images = attached.take();
        let bytes = std::fs::read(fixture("photo.jpg")).unwrap();
        assert_eq!(*images[1].url, *format!("data:image/jpeg;base64,{}", STANDARD.encode(&bytes)));
        assert_eq!((images.len(), attached.take().len()), (2, 0));
    }

    #[test]
    fn files_that_are_no_images_are_refused() {
        let dir = std::env::temp_dir().join(format!("pegainfer-attachments-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let small = ImageFlags { max_image_bytes: 30, ..Limits::default().images };
        let mut attached = Attachments::default();
        for (name, bytes, said) in [
            ("text.png", &b"no image at all"[..], "the image has no known format; send"),
            ("drawing.png", b"<svg xmlns='a'></svg>", "the file is an SVG drawing, which is not supported"),
            ("empty.gif", b"", "the image is empty"),
            ("large.png", &[0; 31], "the image has more than 30 bytes; compress it"),
        ] {
            std::fs::write(dir.join(name), bytes).unwrap();
            let told = attached.attach(&dir.join(name), 0, &small);
            assert!(told.starts_with("error: ") && told.contains(&format!("{name}: {said}")), "{told}");
        }
        assert!(attached.attach(&dir, 0, &small).contains("this is not a file; name a PNG"));
        assert!(attached.attach(&dir.join("missing.png"), 0, &small).contains("missing.png: the file cannot be read"));
        assert!(attached.take().is_empty());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_model_of_text_says_what_to_do() {
        let model = |id: &str, inputs: Option<&[&str]>| Model {
            id: id.to_owned(),
            input_modalities: inputs.map(|inputs| inputs.iter().map(ToString::to_string).collect()),
        };
        let text = model("small", Some(&["text"]));
        let alone = refusal_of(std::slice::from_ref(&text), "small").unwrap();
        assert!(alone.contains("small reads only text; start a model") && alone.contains(EXAMPLE), "{alone}");
        let models = [text, model("later", None), model("vision", Some(&["text", "image"]))];
        let other = refusal_of(&models, "small").unwrap();
        assert_eq!(other, "error: small reads only text; /model vision asks a model that reads images");
        assert_eq!((refusal_of(&models, "later"), refusal_of(&models, "vision")), (None, None));
    }
}
