//! The film test (W7): three players read MPEG-4 films in real time, each from a volume of its own, while a node is lost.
//!
//! The films lie on the volumes byte by byte from the start; `nbdfuse` shows each volume as a file, and each player reads
//! that file past the page cache. A run first shows that its counter counts: the same player, over a server that is
//! stopped for two seconds, must lose frames, or the whole drill fails.

mod make;
mod mount;
mod player;
mod proof;

use super::NodeLossArgs;
use super::grid::{Grid, node_of_segments};
use super::machine::{Machine, Watch};
use super::rejoin::{Loss, Rejoin, Volumes};
use super::tools::{WorkDir, check_interrupt, sleep, sleep_until};
use crate::cli::progress::{Progress, Unit};
use crate::nbd_client::{Client, REQUEST_BYTES_MAX};
use crate::nbd_uri::of_socket;
use anyhow::{Context, Result, bail};
use make::{BLOCK_BYTES, Film, read_padded};
use mount::Mount;
pub use player::BUFFER_FRAMES;
use player::{Player, Showing};
use proof::Proof;
use serde::Serialize;
use std::path::Path;
use std::time::{Duration, Instant};

/// A shorter film has no room for the proof.
const SECONDS_MIN: u64 = proof::SECONDS;

/// Beyond the film's length: a player ends by its own clock, whatever the grid does.
const OVERTIME_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct FilmReport {
    pub workload: String,
    pub layout: String,
    pub fault: String,
    pub node: u32,
    pub seconds: u64,
    /// Reads that failed, decoders that gave up.
    pub errors: u64,
    /// Frames that were shown but not as they were recorded, and blocks of the films that are not what was written.
    pub mismatches: u64,
    /// Frames that were not ready when they were due.
    pub lost_frames: u64,
    pub players: Vec<Showing>,
    /// The same player over a server stopped for two seconds.
    pub counter_proof: Proof,
    pub rejoin: Rejoin,
    /// While the films were played.
    pub machine: Machine,
    pub troubles: Vec<String>,
}

impl FilmReport {
    pub fn has_passed(&self) -> bool {
        self.errors == 0
            && self.mismatches == 0
            && self.lost_frames == 0
            && self.counter_proof.counts()
            && self.rejoin.redundant_s.is_some()
    }
}

pub fn run(grid: &dyn Grid, args: &NodeLossArgs, work: &WorkDir) -> Result<FilmReport> {
    if args.seconds < SECONDS_MIN {
        bail!("a film of {} s is too short for this drill; give --seconds {SECONDS_MIN} or more", args.seconds);
    }
    let films = make::films(&grid.root().join("films"), args.seconds)?;
    eprintln!("showing that the player counts: its server stops for {} s", proof::STOP.as_secs());
    let counter_proof = proof::run(&films[0], work.path())?;

    let mut volumes = Volumes::new(grid, args.keep);
    let mut mounts = Vec::new();
    for film in &films {
        let name = format!("drill-{}-{}", film.name, std::process::id());
        volumes.create(&name, film.volume_bytes(), &args.layout)?;
        eprintln!("writing {} ({} MiB) to volume {name}", film.name, film.bytes >> 20);
        write_film(&grid.socket_of(&name), &name, film)?;
        mounts.push(Mount::open(&of_socket(&grid.socket_of(&name), &name), work.path(), film.name)?);
    }
    // Once more: the host needs a second to see that a node hangs.
    grid.wait_until_up()?;
    let holdings = grid.holdings()?;
    let node = args.node.or_else(|| node_of_segments(&holdings)).context("the grid has no nodes")?;
    eprintln!("playing {} films for {} s, node {node} out ({}) at half time", films.len(), args.seconds, args.fault);
    let watch = Watch::start(work.path())?;
    let (players, loss) = play(grid, args, node, &films, &mounts)?;
    let machine = watch.seen();
    drop(watch);
    eprintln!("bringing the node back");
    let rejoin = loss.rejoin(&volumes.names, Duration::from_secs(args.rejoin_seconds), || Ok(()))?;
    drop(mounts);

    let mut troubles: Vec<String> = players.iter().flat_map(|p| p.troubles.iter().cloned()).collect();
    let mut wrong_blocks = 0;
    for (film, name) in films.iter().zip(&volumes.names) {
        let wrong = compare_film(&grid.socket_of(name), name, film)?;
        if wrong > 0 {
            troubles.push(format!("{wrong} blocks of volume {name} are not what was written"));
        }
        wrong_blocks += wrong;
    }
    if !counter_proof.counts() {
        troubles.push("the player lost no frame while its server was stopped: its count means nothing".to_string());
    }
    Ok(FilmReport {
        workload: args.workload.to_string(),
        layout: args.layout.clone(),
        fault: args.fault.to_string(),
        node,
        seconds: args.seconds,
        errors: players.iter().map(|p| p.errors).sum(),
        mismatches: players.iter().map(|p| p.artefacts).sum::<u64>() + wrong_blocks,
        lost_frames: players.iter().map(|p| p.lost).sum(),
        players,
        counter_proof,
        rejoin,
        machine,
        troubles,
    })
}

/// Plays all films at once and strikes the node at half time.
fn play<'a>(
    grid: &'a dyn Grid,
    args: &NodeLossArgs,
    node: u32,
    films: &[Film],
    mounts: &[Mount],
) -> Result<(Vec<Showing>, Loss<'a>)> {
    let players = films.iter().zip(mounts).map(|(film, mount)| Player::start(film, mount.file(), film.frames()));
    let players = players.collect::<Result<Vec<Player>>>()?;
    let begun = Instant::now();
    let mut progress = Progress::begin("playing", Unit::Seconds, args.seconds, false);
    while begun.elapsed() < Duration::from_secs(args.seconds) / 2 {
        progress.set(begun.elapsed().as_secs());
        sleep_until((begun + Duration::from_secs(args.seconds) / 2).min(Instant::now() + Duration::from_millis(200)))?;
    }
    let loss = Loss::strike(grid, node, args.fault)?;
    let last = begun + Duration::from_secs(args.seconds) + OVERTIME_MAX;
    while !players.iter().all(Player::is_over) && Instant::now() < last {
        progress.set(begun.elapsed().as_secs().min(args.seconds));
        sleep(Duration::from_millis(100))?;
    }
    let showings = players.into_iter().map(Player::finish).collect::<Result<Vec<Showing>>>()?;
    Ok((showings, loss))
}

fn write_film(socket: &Path, volume: &str, film: &Film) -> Result<()> {
    let mut client = Client::connect(socket, volume).with_context(|| format!("cannot connect to volume {volume}"))?;
    let file = film.open()?;
    let mut piece = vec![0; REQUEST_BYTES_MAX];
    let mut progress = Progress::begin(format!("writing {}", film.name), Unit::Bytes, film.padded_bytes(), false);
    for offset in (0..film.padded_bytes()).step_by(REQUEST_BYTES_MAX) {
        check_interrupt()?;
        let len = (film.padded_bytes() - offset).min(REQUEST_BYTES_MAX as u64) as usize;
        read_padded(&file, offset, &mut piece[..len])?;
        client.write(offset, &piece[..len]).with_context(|| format!("cannot write the film to volume {volume}"))?;
        progress.set(offset + len as u64);
    }
    client.flush().with_context(|| format!("cannot flush volume {volume}"))
}

/// Counts the blocks that differ from what was written.
fn compare_film(socket: &Path, volume: &str, film: &Film) -> Result<u64> {
    let mut client = Client::connect(socket, volume).with_context(|| format!("cannot connect to volume {volume}"))?;
    let file = film.open()?;
    let mut expected = vec![0; REQUEST_BYTES_MAX];
    let (mut wrong, mut unreadable) = (0, None);
    client
        .scan(0..film.padded_bytes(), 4, |offset, data| {
            let Ok(data) = data else {
                wrong += 1;
                return;
            };
            match read_padded(&file, offset, &mut expected[..data.len()]) {
                Ok(()) => {
                    let pairs = data.chunks(BLOCK_BYTES).zip(expected.chunks(BLOCK_BYTES));
                    wrong += pairs.filter(|(a, b)| a != b).count() as u64;
                }
                Err(error) => unreadable = Some(error),
            }
        })
        .with_context(|| format!("volume {volume} cannot be read back"))?;
    unreadable.map_or(Ok(wrong), Err)
}
