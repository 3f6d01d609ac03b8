//! CUDA C++: one fat binary a source file.

use super::abi;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::{env, fmt::Write, fs};

/// Ampere (A100, then GeForce 30), Ada, Hopper, Blackwell (B200 and B300, Thor, GeForce 50 and GB10). Code for 10.0 also
/// runs on 10.3, and code for 12.0 on 12.1, because no kernel uses instructions of one chip of Blackwell.
pub const DEFAULT_SM: &str = "80,86,89,90a,100,110,120";
const HOW: &str = "run tools/setup-cuda.sh, or set CUDA_HOME to a CUDA 12.8 or newer toolkit";

/// Directories with sources.
const DIRECTORIES: [&str; 2] = ["csrc", "tilelang"];

/// A source file.
pub struct Source {
    path: PathBuf,
    /// Name of its image: its path below its directory, `attention_decode_bulk` of csrc/attention/decode_bulk.cu.
    name: String,
    /// The directory, which is also where the compiler looks for headers.
    directory: PathBuf,
}

impl Source {
    /// True for csrc/, whose kernels [`abi`] lists; generated sources have launchers of their own.
    fn is_listed(&self) -> bool {
        self.directory.ends_with("csrc")
    }

    /// The image's file in `images`, named by a hash of all that it is made of: the same image is not compiled again.
    fn image(&self, compiler: &Compiler, out: &Path, images: &Path) -> Result<PathBuf, String> {
        let mut hasher = DefaultHasher::new();
        (&compiler.version, &compiler.flags).hash(&mut hasher);
        let mut files = files_below(&self.directory, "cuh")?;
        files.extend([self.path.clone(), out.join("limits.h"), out.join(format!("abi/{}.h", self.name))]);
        // Generated sources have no list of arguments.
        for file in files.iter().filter(|file| file.exists()) {
            fs::read(file).map_err(|e| format!("{}: {e}", file.display()))?.hash(&mut hasher);
        }
        Ok(images.join(format!("{}-{:016x}.fatbin", self.name, hasher.finish())))
    }
}

/// A compiler with its flags.
struct Compiler {
    nvcc: PathBuf,
    version: Vec<u8>,
    flags: Vec<String>,
}

impl Compiler {
    fn new(nvcc: &Path, architectures: &[String]) -> Result<Self, String> {
        let asked = Command::new(nvcc).arg("--version").output().map_err(|e| format!("{}: {e}", nvcc.display()))?;
        let flags = ["-fatbin", "-O3", "-std=c++17", "-lineinfo", "-Xfatbin=-compress-all"].map(str::to_owned);
        let code = architectures.iter().map(|sm| format!("-gencode=arch=compute_{sm},code=sm_{sm}"));
        Ok(Self { nvcc: nvcc.to_owned(), version: asked.stdout, flags: flags.into_iter().chain(code).collect() })
    }

    /// Starts to compile `source` to a file of `out`.
    fn start(&self, source: &Source, out: &Path) -> Result<(Child, PathBuf), String> {
        let image = out.join(format!("{}.fatbin", source.name));
        let mut command = Command::new(&self.nvcc);
        // ptxas reports the entry points.
        command.args(&self.flags).arg("-Xptxas=-v").arg("-I").arg(out).arg("-I").arg(&source.directory);
        command.arg(&source.path).arg("-o").arg(&image).stderr(Stdio::piped());
        Ok((command.spawn().map_err(|e| format!("{}: {e}", self.nvcc.display()))?, image))
    }
}

/// The sources, sorted by path; cargo watches their directories. An error if two images would have the same name.
pub fn sources(root: &Path) -> Result<Vec<Source>, String> {
    let mut sources: Vec<Source> = Vec::new();
    for directory in DIRECTORIES.map(|name| root.join(name)) {
        println!("cargo:rerun-if-changed={}", directory.display());
        for path in files_below(&directory, "cu")? {
            let below = path.strip_prefix(&directory).unwrap_or(&path).with_extension("");
            let name = below.iter().map(OsStr::to_string_lossy).collect::<Vec<_>>().join("_");
            if let Some(other) = sources.iter().find(|source| source.name == name) {
                return Err(format!("{} and {} have the same name", other.path.display(), path.display()));
            }
            sources.push(Source { path, name, directory: directory.clone() });
        }
    }
    Ok(sources)
}

/// The files with this extension in a directory and in those below it, sorted.
fn files_below(directory: &Path, extension: &str) -> Result<Vec<PathBuf>, String> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(|e| format!("{}: {e}", directory.display()))? {
        let path = entry.map_err(|e| format!("{}: {e}", directory.display()))?.path();
        if path.is_dir() {
            files.extend(files_below(&path, extension)?);
        } else if path.extension() == Some(OsStr::new(extension)) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The compiler, unless this build is without CUDA.
pub fn nvcc(root: &Path) -> Result<Option<PathBuf>, String> {
    let wheels = root.join("../.cuda/nvidia/cu13/bin/nvcc");
    // A file that is not there counts as changed in every build; tools/setup-cuda.sh tells cargo when it comes.
    if wheels.exists() {
        println!("cargo:rerun-if-changed={}", wheels.display());
    }
    match env::var("PEGAINFER_CUDA").as_deref() {
        Err(_) | Ok("auto" | "") => Ok(find_nvcc(&wheels).or_else(|| {
            // The one kind of line of a build script that cargo shows.
            println!(
                "cargo:warning=building without GPU support: no nvcc was found; {HOW} (PEGAINFER_CUDA=off hides this)"
            );
            None
        })),
        Ok("off") => Ok(None),
        Ok("required") => {
            Ok(Some(find_nvcc(&wheels).ok_or_else(|| format!("PEGAINFER_CUDA=required, but there is no nvcc: {HOW}"))?))
        }
        Ok(other) => Err(format!("PEGAINFER_CUDA={other}: expected auto, required or off")),
    }
}

/// CUDA_HOME, the wheels, the PATH, the usual place: the first that has an nvcc.
fn find_nvcc(wheels: &Path) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin/nvcc"));
    let mut candidates = home.into_iter().chain([wheels.to_path_buf()]);
    let on_path = env::split_paths(&path).map(|dir| dir.join("nvcc"));
    let usual = PathBuf::from("/usr/local/cuda/bin/nvcc");
    candidates.find(|nvcc| nvcc.is_file()).or_else(|| on_path.chain([usual]).find(|nvcc| nvcc.is_file()))
}

/// The wanted architectures, as `90a`, less those that this nvcc does not know.
pub fn architectures(nvcc: &Path) -> Result<Vec<String>, String> {
    let wanted = match env::var("PEGAINFER_CUDA_SM") {
        Ok(list) if !list.is_empty() => list,
        _ => present().unwrap_or_else(|| DEFAULT_SM.to_owned()),
    };
    let known = Command::new(nvcc).arg("--list-gpu-code").output().map_err(|e| format!("{}: {e}", nvcc.display()))?;
    let known = String::from_utf8_lossy(&known.stdout).into_owned();
    let known = |sm: &str| known.lines().any(|line| line == format!("sm_{}", digits(sm)));
    let found: Vec<String> = wanted.split(',').map(str::trim).filter(|sm| known(sm)).map(str::to_owned).collect();
    match found.is_empty() {
        true => Err(format!("{} knows none of the architectures {wanted}", nvcc.display())),
        false => Ok(found),
    }
}

/// An architecture without its suffix: `90` of `90a`.
pub fn digits(sm: &str) -> &str {
    sm.trim_end_matches(|c: char| c.is_ascii_alphabetic())
}

/// Architectures of the GPUs here, if there is a driver to ask.
fn present() -> Option<String> {
    let asked = Command::new("nvidia-smi").args(["--query-gpu=compute_cap", "--format=csv,noheader"]).output().ok()?;
    let text = String::from_utf8(asked.stdout).ok().filter(|_| asked.status.success())?;
    let mut list: Vec<String> = text.lines().filter_map(target).collect();
    list.sort();
    list.dedup();
    (!list.is_empty()).then(|| list.join(","))
}

/// The architecture to compile for, of a compute capability such as `9.0`: Hopper's own instructions need the suffix, and
/// later chips run the code of the first one of their generation.
fn target(capability: &str) -> Option<String> {
    let (major, minor) = capability.trim().split_once('.')?;
    Some(match major.parse::<u32>().ok()? {
        ..=8 => format!("{major}{minor}"),
        9 => "90a".to_owned(),
        _ => format!("{major}0"),
    })
}

/// Compiles every source, as many at a time as there are cores; their images, in order. Those of csrc/ include
/// `abi/IMAGE.h`, and their kernels must be the ones that [`abi`] lists.
pub fn compile(nvcc: &Path, architectures: &[String], sources: &[Source], out: &Path) -> Result<Vec<PathBuf>, String> {
    let compiler = Compiler::new(nvcc, architectures)?;
    abi::write_limits(out)?;
    for source in sources.iter().filter(|source| source.is_listed()) {
        abi::write_header(&source.name, out)?;
    }
    // OUT_DIR is TARGET/PROFILE/build/PACKAGE/out. Lints, tests and all profiles embed the same images.
    let folder = out.ancestors().nth(4).unwrap_or(out).join("cuda-images");
    fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let images: Vec<PathBuf> =
        sources.iter().map(|source| source.image(&compiler, out, &folder)).collect::<Result<_, _>>()?;
    let missing: Vec<_> = sources.iter().zip(&images).filter(|(_, image)| !image.exists()).collect();
    let parallel = std::thread::available_parallelism().map_or(1, usize::from);
    for group in missing.chunks(parallel) {
        let running: Vec<_> = group.iter().map(|(source, _)| compiler.start(source, out)).collect::<Result<_, _>>()?;
        for ((child, built), (source, image)) in running.into_iter().zip(group) {
            let output = child.wait_with_output().map_err(|e| format!("nvcc: {e}"))?;
            let log = String::from_utf8_lossy(&output.stderr);
            log.lines().filter(|line| !abi::is_report(line)).for_each(|line| eprintln!("{line}"));
            if !output.status.success() {
                let (path, nvcc) = (source.path.display(), nvcc.display());
                return Err(format!("{nvcc} failed on {path}; PEGAINFER_CUDA=off builds without CUDA"));
            }
            if source.is_listed() {
                abi::check_entries(&source.name, &log)?;
            }
            // Whole or not at all: other builds look for it.
            fs::rename(&built, image).map_err(|e| format!("{}: {e}", image.display()))?;
        }
    }
    Ok(images)
}

/// One static `Image` a source. The driver wants fat binaries aligned; `include_bytes!` alone is not.
pub fn images(sources: &[Source], built: Option<&[PathBuf]>) -> String {
    let mut text = format!("/// Whether this build has GPU code.\npub const BUILT: bool = {};\n", built.is_some());
    let mut names = Vec::new();
    for (place, source) in sources.iter().enumerate() {
        let bytes = match built {
            Some(images) => format!("&Aligned(*include_bytes!({:?})).0", images[place]),
            None => "&[]".to_owned(),
        };
        let path = source.path.strip_prefix(source.directory.parent().unwrap_or(Path::new(""))).unwrap_or(&source.path);
        let (path, name, capitals) = (path.display(), &source.name, source.name.to_uppercase());
        let _ =
            writeln!(text, "/// {path}.\npub static {capitals}: Image = Image {{ name: {name:?}, bytes: {bytes} }};");
        names.push(format!("&{capitals}"));
    }
    let _ = writeln!(text, "/// All of them.\npub static ALL: &[&Image] = &[{}];", names.join(", "));
    text
}
