//! Paths as the user types them.

use std::path::{MAIN_SEPARATOR, Path, PathBuf};

/// Ends of the names of images.
const IMAGES: [&str; 5] = ["png", "jpg", "jpeg", "webp", "gif"];

/// The file that the user means: the text is its path, or its path as a terminal or shell writes it, in quotes or with
/// backslashes before blanks. `~/` is the home directory.
pub(super) fn file(text: &str) -> PathBuf {
    let unquoted = ['"', '\''].iter().find_map(|quote| text.strip_prefix(*quote)?.strip_suffix(*quote));
    let other = unquoted.map_or_else(|| text.replace("\\ ", " "), str::to_owned);
    let typed = from_home(text);
    if typed.exists() { typed } else { from_home(&other) }
}

fn from_home(text: &str) -> PathBuf {
    match text.strip_prefix("~/").zip(std::env::home_dir()) {
        Some((rest, home)) => home.join(rest),
        None => PathBuf::from(text),
    }
}

/// The folders and images whose path begins with `typed`, in order. Hidden ones only if a name begins with a dot.
pub(super) fn images(typed: &str) -> Vec<String> {
    let is_separator = |c: char| c == '/' || c == MAIN_SEPARATOR;
    let (folder, begun) = typed.split_at(typed.rfind(is_separator).map_or(0, |at| at + 1));
    let dir = if folder.is_empty() { PathBuf::from(".") } else { from_home(folder) };
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let completion = |entry: std::fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let is_meant = name.starts_with(begun) && (begun.starts_with('.') || !name.starts_with('.'));
        let path = format!("{folder}{name}");
        match is_meant {
            true if entry.path().is_dir() => Some(path + "/"),
            true => is_image(Path::new(&name)).then_some(path),
            false => None,
        }
    };
    let mut found: Vec<String> = entries.flatten().filter_map(completion).collect();
    found.sort();
    found
}

fn is_image(path: &Path) -> bool {
    let end = path.extension().and_then(|end| end.to_str());
    end.is_some_and(|end| IMAGES.iter().any(|image| end.eq_ignore_ascii_case(image)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_and_completed() {
        let dir = std::env::temp_dir().join(format!("pegainfer-paths-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("pictures")).unwrap();
        for name in ["a cat.png", "photo.JPG", "notes.txt", ".hidden.gif", "pictures/b.webp"] {
            std::fs::write(dir.join(name), "").unwrap();
        }
        let path = |name: &str| format!("{}/{name}", dir.display());
        let all = |typed: &str| images(&path(typed));
        assert_eq!(all(""), [path("a cat.png"), path("photo.JPG"), path("pictures/")]);
        assert_eq!((all("pi"), all("pictures/")), (vec![path("pictures/")], vec![path("pictures/b.webp")]));
        assert_eq!((all(".h"), all("notes"), all("none/x")), (vec![path(".hidden.gif")], Vec::new(), Vec::new()));
        let cat = PathBuf::from(path("a cat.png"));
        for text in [path("a cat.png"), path("a\\ cat.png"), format!("'{}'", path("a cat.png"))] {
            assert_eq!(file(&text), cat, "{text}");
        }
        assert_eq!(file("missing.png"), PathBuf::from("missing.png"));
        assert_eq!(file("~/x.png"), std::env::home_dir().unwrap().join("x.png"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
