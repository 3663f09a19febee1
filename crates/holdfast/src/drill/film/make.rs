//! The films: made once with ffmpeg, kept beside the grid, each with the checksum of every decoded frame.

use super::super::tools::output_of;
use super::player::decode_all;
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const FRAMES_PER_SECOND: u64 = 25;
pub const WIDTH: usize = 1280;
pub const HEIGHT: usize = 720;

/// One decoded frame in planar YUV with halved chroma.
pub const FRAME_BYTES: usize = WIDTH * HEIGHT * 3 / 2;

/// Bytes are read and written in these units.
pub const BLOCK_BYTES: usize = 4096;

/// Volumes have whole MiB and room to spare.
const VOLUME_UNIT: u64 = 16 << 20;

/// What moves in each film; grain on top makes every frame worth its bits.
const SCENES: [(&str, &str); 3] = [
    ("clock", "testsrc2=size=1280x720:rate=25"),
    ("bars", "smptehdbars=size=1280x720:rate=25"),
    ("colours", "gradients=size=1280x720:rate=25:nb_colors=5:speed=0.02:seed=7"),
];

/// One film on the local disk.
#[derive(Clone, Debug)]
pub struct Film {
    pub name: &'static str,
    pub path: PathBuf,
    pub bytes: u64,
    /// Checksum of each decoded frame, in order.
    pub checksums: Vec<u32>,
    /// Where each frame ends in the file.
    pub ends: Vec<u64>,
}

impl Film {
    pub fn frames(&self) -> usize {
        self.checksums.len()
    }

    pub fn volume_bytes(&self) -> u64 {
        self.bytes.next_multiple_of(VOLUME_UNIT) + VOLUME_UNIT
    }

    /// Bytes of the film on its volume: whole blocks, zeroes after the end.
    pub fn padded_bytes(&self) -> u64 {
        self.bytes.next_multiple_of(BLOCK_BYTES as u64)
    }

    pub fn open(&self) -> Result<File> {
        File::open(&self.path).with_context(|| format!("cannot open {}", self.path.display()))
    }
}

/// Fills `piece` from `offset` of a file on, with zeroes after the file's end.
pub fn read_padded(file: &File, offset: u64, piece: &mut [u8]) -> Result<()> {
    let mut done = 0;
    while done < piece.len() {
        match file.read_at(&mut piece[done..], offset + done as u64).context("cannot read a film")? {
            0 => {
                piece[done..].fill(0);
                return Ok(());
            }
            len => done += len,
        }
    }
    Ok(())
}

/// The three films of `seconds`, made where `dir` doesn't have them.
pub fn films(dir: &Path, seconds: u64) -> Result<Vec<Film>> {
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    SCENES.iter().map(|(name, scene)| film(dir, name, scene, seconds)).collect()
}

fn film(dir: &Path, name: &'static str, scene: &str, seconds: u64) -> Result<Film> {
    let path = dir.join(format!("{name}-{seconds}s.mp4"));
    let list = dir.join(format!("{name}-{seconds}s.frames"));
    // The list is written last: where it is, the film is whole.
    if !list.exists() {
        eprintln!("making film {} of {seconds} s", path.display());
        encode(&path, scene, seconds)?;
        let (checksums, ends) = (decode_all(&path)?, frame_ends(&path)?);
        if checksums.len() != ends.len() {
            bail!("{} has {} frames and {} were decoded", path.display(), ends.len(), checksums.len());
        }
        let lines = checksums.iter().zip(&ends).map(|(checksum, end)| format!("{checksum:08x} {end}\n"));
        let text: String = lines.collect();
        let beside = list.with_extension("new");
        fs::write(&beside, text)
            .and_then(|()| fs::rename(&beside, &list))
            .with_context(|| format!("cannot write {}; check space and permissions", list.display()))?;
    }
    let text = fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
    let (checksums, ends) = parse_list(&text)
        .with_context(|| format!("{} is damaged; remove it, and the film is made again", list.display()))?;
    if checksums.len() as u64 != seconds * FRAMES_PER_SECOND {
        bail!(
            "{} has {} frames instead of {}; remove it",
            path.display(),
            checksums.len(),
            seconds * FRAMES_PER_SECOND
        );
    }
    let bytes = fs::metadata(&path).with_context(|| format!("cannot read {}", path.display()))?.len();
    Ok(Film { name, path, bytes, checksums, ends })
}

fn parse_list(text: &str) -> Result<(Vec<u32>, Vec<u64>)> {
    let parse = |line: &str| -> Option<(u32, u64)> {
        let (checksum, end) = line.split_once(' ')?;
        Some((u32::from_str_radix(checksum, 16).ok()?, end.parse().ok()?))
    };
    text.lines().map(|line| parse(line).with_context(|| format!("`{line}` is no frame"))).collect()
}

/// Where each frame ends in a file.
fn frame_ends(path: &Path) -> Result<Vec<u64>> {
    let mut command = Command::new("ffprobe");
    command.args([
        "-v",
        "error",
        "-select_streams",
        "v",
        "-show_entries",
        "packet=size,pos",
        "-of",
        "csv=print_section=0",
    ]);
    let text = String::from_utf8(output_of(command.arg(path))?).context("ffprobe prints no text")?;
    let end = |line: &str| -> Option<u64> {
        let mut numbers = line.split(',').filter(|field| !field.is_empty()).map(|field| field.parse::<u64>().ok());
        Some(numbers.next()?? + numbers.next()??)
    };
    text.lines()
        .filter(|line| !line.is_empty())
        .map(|line| end(line).with_context(|| format!("ffprobe says `{line}` of a frame")))
        .collect()
}

/// The quantiser is fixed, so that all frames have about the same size and a player reads 1 to 2 MB in every second; the
/// index is in front, so that a pipe can be decoded.
fn encode(path: &Path, scene: &str, seconds: u64) -> Result<()> {
    let mut command = Command::new("ffmpeg");
    command.args(["-v", "error", "-nostdin", "-y", "-f", "lavfi", "-i", scene, "-t", &seconds.to_string()]);
    command.args(["-vf", "noise=alls=12:allf=t:all_seed=7,format=yuv420p", "-c:v", "mpeg4", "-q:v", "7", "-g", "25"]);
    command.args(["-movflags", "+faststart", "-f", "mp4"]).arg(path);
    output_of(&mut command).context("cannot make a film")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_frames_is_read_back() {
        assert_eq!(parse_list("00000001 44\nffffffff 99\n").unwrap(), (vec![1, u32::MAX], vec![44, 99]));
        assert!(parse_list("zebra 1\n").is_err());
        assert!(parse_list("00000001\n").is_err());
    }

    #[test]
    fn a_volume_has_room_for_the_padded_film() {
        for bytes in [1, 16 << 20, (16 << 20) + 1] {
            let film = Film { name: "x", path: PathBuf::new(), bytes, checksums: Vec::new(), ends: Vec::new() };
            assert!(film.volume_bytes() >= film.padded_bytes() + BLOCK_BYTES as u64);
            assert!(film.volume_bytes().is_multiple_of(VOLUME_UNIT));
        }
    }

    #[test]
    fn pieces_of_a_film_end_in_zeroes() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("film");
        fs::write(&path, b"abcdef").unwrap();
        let (file, mut piece) = (File::open(&path).unwrap(), [9; 4]);
        read_padded(&file, 4, &mut piece).unwrap();
        assert_eq!(&piece, b"ef\0\0");
        read_padded(&file, 100, &mut piece).unwrap();
        assert_eq!(piece, [0; 4]);
    }
}
