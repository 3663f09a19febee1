//! `holdfast send` and `holdfast receive`: snapshots as streams, from grid to grid.

use super::format::{print, print_json};
use super::progress::{Progress, Unit};
use crate::client;
use crate::grid::layout::GridDir;
use crate::nbd_client::{Client, REQUEST_BYTES_MAX, Run};
use anyhow::{Context, Result};
use clap::Args;
use holdfast_api::{Code, Request, Response, refuse};
use holdfast_base::size::Size;
use holdfast_format::geometry::Layout;
use holdfast_format::stream::{Begin, HEAD_BYTES, Part, Receiver, Sender, Totals};
use serde_json::json;
use std::fmt;
use std::io::{IsTerminal, Read, Write};
use std::ops::Range;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Requests under way while a snapshot is read.
pub(super) const READ_DEPTH: usize = 8;

/// Bytes of a volume that are asked about at a time.
pub(super) const ASKED_BYTES: u64 = 1 << 30;

/// How often a receiver notes how far it has come.
const NOTE_EVERY: Duration = Duration::from_secs(2);

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast send vm1@monday | ssh other holdfast receive vm1-copy\n  \
    holdfast send --from monday vm1@tuesday | ssh other holdfast receive vm1-copy\n  \
    holdfast send --resume \"$(ssh other holdfast receive --resume-token vm1-copy)\" | ssh other holdfast receive vm1-copy\n\n\
    The first sends all of the snapshot, the second what changed since another one, the third the rest of a stream that was \
    cut off. Every frame has a checksum that depends on those before it.")]
pub struct SendArgs {
    /// VOLUME@SNAPSHOT, of a volume in service
    #[arg(required_unless_present = "resume", conflicts_with = "resume")]
    snapshot: Option<String>,
    /// Send only what differs from this snapshot of the same volume, which the receiver has
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "resume")]
    from: Option<String>,
    /// The rest of a stream, as `holdfast receive --resume-token` names it
    #[arg(long, value_name = "TOKEN")]
    resume: Option<Wanted>,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast send vm1@monday | ssh other holdfast receive vm1-copy\n  \
    holdfast receive --resume-token vm1-copy      how to go on with a stream that was cut off\n\n\
    A whole stream makes the volume; one that builds on a snapshot needs a volume that has a copy of it and was not written \
    to since. The volume is out of service meanwhile and afterwards, with the snapshot on it: `holdfast volume export`. \
    Volumes that were received can be sent on, also back to where they came from.")]
pub struct ReceiveArgs {
    name: String,
    /// Redundancy of a volume that is made, if not the sender's
    #[arg(long)]
    layout: Option<Layout>,
    /// Print what `holdfast send --resume` takes, and receive nothing
    #[arg(long)]
    resume_token: bool,
    /// Give up the part of a stream that has come: the volume becomes the snapshot that the stream builds on
    #[arg(long, conflicts_with_all = ["resume_token", "layout"])]
    abandon: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    holdfast changes vm1@tuesday --from monday\n  \
    holdfast changes vm1 --from tuesday --json\n  \
    nbdinfo --map=holdfast:changed:monday \"nbd+unix:///vm1@tuesday?socket=…\"    the same, over NBD\n\n\
    Blocks that were written between the two, whatever was written; all others are the same in both.")]
pub struct ChangesArgs {
    /// VOLUME or VOLUME@SNAPSHOT, of a volume in service
    of: String,
    /// Another snapshot of the same volume
    #[arg(long, value_name = "SNAPSHOT")]
    from: String,
}

/// What a stream is to tell; its text is what resumes one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted {
    pub volume: String,
    pub snapshot: String,
    pub from: Option<String>,
    pub start: u64,
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.volume, self.snapshot)?;
        self.from.iter().try_for_each(|from| write!(f, "/from={from}"))?;
        write!(f, "/at={}", self.start)
    }
}

impl FromStr for Wanted {
    type Err = String;
    fn from_str(text: &str) -> Result<Wanted, String> {
        let mut parts = text.split('/');
        let of = parts.next().and_then(|of| of.split_once('@'));
        let Some((volume, snapshot)) = of.filter(|(volume, snapshot)| !volume.is_empty() && !snapshot.is_empty())
        else {
            return Err("expected VOLUME@SNAPSHOT, for example vm1@monday".to_string());
        };
        let mut wanted = Wanted { volume: volume.to_string(), snapshot: snapshot.to_string(), from: None, start: 0 };
        for part in parts {
            match part.split_once('=') {
                Some(("from", from)) => wanted.from = Some(from.to_string()),
                Some(("at", at)) => wanted.start = at.parse().map_err(|_| format!("`{at}` is no offset"))?,
                _ => return Err(format!("`{part}` is not known; take the token as `holdfast receive` prints it")),
            }
        }
        Ok(wanted)
    }
}

pub fn send(args: SendArgs, dir: &GridDir, json: bool) -> Result<()> {
    if std::io::stdout().is_terminal() {
        refuse!(Code::Invalid, "the stream is not for a terminal; pipe it into `holdfast receive`, or into a file");
    }
    let wanted = match (args.snapshot, args.resume) {
        (Some(snapshot), _) => {
            let wanted: Wanted = snapshot.parse().map_err(anyhow::Error::msg)?;
            Wanted { from: args.from, ..wanted }
        }
        (None, Some(resumed)) => resumed,
        (None, None) => unreachable!("one of both is there"),
    };
    let begun = Instant::now();
    let begin = ask_begin(dir, &wanted)?;
    let what = format!("sending {}@{}", begin.volume, begin.snapshot);
    let mut progress = Progress::begin(what, Unit::Bytes, begin.size_bytes, json);
    let totals = write_stream(dir, &wanted, &begin, &mut std::io::stdout().lock(), |at| progress.set(at));
    drop(progress);
    let totals = totals.with_context(|| format!("the stream of {}@{} broke off", begin.volume, begin.snapshot))?;
    if json {
        eprintln!("{}", json!({ "data_bytes": totals.data_bytes, "zeroes_bytes": totals.zeroes_bytes }));
    } else {
        eprintln!("sent {}@{}: {}", begin.volume, begin.snapshot, told(totals, begun.elapsed()));
    }
    Ok(())
}

pub fn told(totals: Totals, took: Duration) -> String {
    let data = Size(totals.data_bytes);
    let zeroes =
        if totals.zeroes_bytes > 0 { format!(", {} of zeroes", Size(totals.zeroes_bytes)) } else { String::new() };
    format!("{data} of data{zeroes} in {:.1} s", took.as_secs_f64())
}

/// What a stream tells of a part of the volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Piece {
    Data(Range<u64>),
    Zeroes(Range<u64>),
}

pub(super) fn ask_begin(dir: &GridDir, wanted: &Wanted) -> Result<Begin> {
    let Wanted { volume, snapshot, from, start } = wanted.clone();
    let request = Request::SendBegin { volume, snapshot, from, start };
    match client::ask(dir, &request, client::UNHURRIED)? {
        Response::Begin(begin) => Ok(*begin),
        other => {
            refuse!(Code::Unsupported, "the host's answer does not fit the request ({other:?}): is it another release?")
        }
    }
}

/// `tell` hears up to where the volume has been told of.
fn write_stream(
    dir: &GridDir,
    wanted: &Wanted,
    begin: &Begin,
    out: &mut impl Write,
    mut tell: impl FnMut(u64),
) -> Result<Totals> {
    let export = format!("{}@{}", begin.volume, begin.snapshot);
    let changed = begin.from.as_ref().map(|(from, _)| format!("holdfast:changed:{from}"));
    let contexts: Vec<&str> = ["base:allocation"].into_iter().chain(changed.as_deref()).collect();
    let mut asking = Client::connect_for_status(&dir.nbd_socket(), &export, &contexts)?;
    let mut reading = Client::connect(&dir.nbd_socket(), &export)?;
    if ask_begin(dir, wanted)? != *begin {
        refuse!(Code::Changed, "a snapshot was deleted and taken anew at this very moment; try again");
    }
    let mut sender = Sender::default();
    out.write_all(&sender.begin(begin))?;
    let mut at = begin.start;
    while at < begin.size_bytes {
        let len = ASKED_BYTES.min(begin.size_bytes - at) as u32;
        let told = asking.status(at, len)?;
        let (pieces, end) = pieces(at, &told);
        at = end;
        let mut rest = &pieces[..];
        while let Some(first) = rest.first() {
            if let Piece::Zeroes(range) = first {
                out.write_all(&sender.zeroes(range.start, range.end - range.start))?;
                rest = &rest[1..];
                continue;
            }
            let data = rest.iter().map_while(|piece| match piece {
                Piece::Data(range) => Some(range.clone()),
                Piece::Zeroes(_) => None,
            });
            let data: Vec<Range<u64>> = data.collect();
            rest = &rest[data.len()..];
            reading.read_in_order(data, READ_DEPTH, |offset, bytes| {
                tell(offset);
                out.write_all(&sender.data(offset, bytes))?;
                out.write_all(bytes)
            })?;
        }
    }
    out.write_all(&sender.end())?;
    out.flush()?;
    Ok(sender.totals())
}

/// What a stream tells of the bytes from `at` on, and up to where: `told` is the allocation, then the changes if only those
/// are sent. Where all is sent holes need not be told of.
pub(super) fn pieces(at: u64, told: &[Vec<Run>]) -> (Vec<Piece>, u64) {
    const HOLE: u32 = 3;
    const CHANGED: u32 = 1;
    let ends = |runs: &[Run]| runs.iter().map(|(len, _)| len).sum::<u64>();
    let end = at + told.iter().map(|runs| ends(runs)).min().unwrap_or(0);
    let mut runs: Vec<_> = told.iter().map(|runs| runs.iter().copied().peekable()).collect();
    let mut pieces: Vec<Piece> = Vec::new();
    let mut from = at;
    while from < end {
        let now: Vec<Run> = runs.iter_mut().map(|runs| *runs.peek().expect("runs up to the end")).collect();
        let len = now.iter().map(|(len, _)| *len).min().expect("at least the allocation").min(end - from);
        for runs in &mut runs {
            let run = runs.peek_mut().expect("just seen");
            run.0 -= len;
            if run.0 == 0 {
                runs.next();
            }
        }
        let range = from..from + len;
        from += len;
        let is_hole = now[0].1 == HOLE;
        match (now.get(1), pieces.last_mut()) {
            (Some((_, flags)), _) if flags & CHANGED == 0 => {}
            (None, _) if is_hole => {}
            (_, Some(Piece::Data(last))) if !is_hole && last.end == range.start => last.end = range.end,
            (_, Some(Piece::Zeroes(last))) if is_hole && last.end == range.start => last.end = range.end,
            (_, _) if is_hole => pieces.push(Piece::Zeroes(range)),
            _ => pieces.push(Piece::Data(range)),
        }
    }
    (pieces, end)
}

pub fn receive(args: &ReceiveArgs, dir: &GridDir, json: bool) -> Result<()> {
    if args.resume_token {
        let token = resume_token(dir, &args.name)?;
        return match token {
            Some(token) => print(token),
            None => refuse!(
                Code::NotFound,
                "volume {} holds no part of a stream; there is nothing to go on with",
                args.name
            ),
        };
    }
    if args.abandon {
        client::done(dir, &Request::ReceiveAbandon { name: args.name.clone() })?;
        let text = format!("volume {} is what it was before the stream", args.name);
        return if json { print_json(&json!({ "name": args.name, "done": true })) } else { print(text) };
    }
    if std::io::stdin().is_terminal() {
        refuse!(
            Code::Invalid,
            "there is no stream to receive; pipe one in: `holdfast send vm1@monday | holdfast receive vm1-copy`"
        );
    }
    let begun = Instant::now();
    let mut input = std::io::stdin().lock();
    let mut stream = Frames { input: &mut input, receiver: Receiver::default() };
    let Part::Begin(begin) = stream.next(&mut Vec::new())? else {
        refuse!(Code::Invalid, "the stream does not begin with its beginning")
    };
    let (name, layout) = (&args.name, args.layout.map(|layout| layout.to_string()));
    let what = format!("receiving {name}@{}", begin.snapshot);
    let broken = format!(
        "the stream broke off; what has come is kept, and `holdfast receive --resume-token {name}` prints what `holdfast send \
         --resume` needs to go on"
    );
    let taking = Taking { name, layout, begin: &begin, what, broken, json };
    let totals = taking.run(dir, &mut |payload| stream.next(payload))?;
    let text = format!("received {name}@{}: {}", begin.snapshot, told(totals, begun.elapsed()));
    let Totals { data_bytes, zeroes_bytes } = totals;
    let answer = json!({ "snapshot": begin.snapshot, "data_bytes": data_bytes, "zeroes_bytes": zeroes_bytes });
    if json { print_json(&answer) } else { print(text) }
}

/// How to go on with a stream of which the volume has a part.
pub fn resume_token(dir: &GridDir, name: &str) -> Result<Option<String>> {
    match client::ask(dir, &Request::ReceiveState { name: name.to_string() }, client::UNHURRIED)? {
        Response::Resume { token } => Ok(token),
        _ => refuse!(Code::Unsupported, "the host's answer does not fit the request: is it another release?"),
    }
}

/// The next part of a stream; its data are put into what is given.
pub type Next<'a> = &'a mut dyn FnMut(&mut Vec<u8>) -> Result<Part>;

/// A stream that a volume takes in.
pub struct Taking<'a> {
    pub name: &'a str,
    /// Of a volume that is made, if not the stream's.
    pub layout: Option<String>,
    pub begin: &'a Begin,
    /// For people, while it goes on.
    pub what: String,
    /// For people, when it breaks off.
    pub broken: String,
    pub json: bool,
}

impl Taking<'_> {
    /// What comes after the beginning, to its end. What has come before an error is kept.
    ///
    /// # Errors
    /// The stream breaks off, or the volume can't take it.
    pub fn run(self, dir: &GridDir, next: Next) -> Result<Totals> {
        let Taking { name, layout, begin, what, broken, json } = self;
        let request = Request::ReceiveBegin { name: name.to_string(), begin: Box::new(begin.clone()), layout };
        let (export, ticket) = match client::ask(dir, &request, client::PATIENT)? {
            Response::Receiving { export, ticket } => (export, ticket),
            // All of it is there.
            Response::Done => return Ok(Totals::default()),
            other => {
                refuse!(
                    Code::Unsupported,
                    "the host's answer does not fit the request ({other:?}): is it another release?"
                )
            }
        };
        let end = |complete| {
            let (name, ticket) = (name.to_string(), ticket.clone());
            client::done(dir, &Request::ReceiveEnd { name, ticket, complete })
        };
        let note = |offset| {
            let (name, ticket) = (name.to_string(), ticket.clone());
            client::done(dir, &Request::ReceiveProgress { name, ticket, offset })
        };
        let volume = Client::connect(&dir.nbd_socket(), &export).context("cannot write to the volume");
        let taken = volume.and_then(|mut volume| {
            let mut progress = Progress::begin(what, Unit::Bytes, begin.size_bytes, json);
            take_in(next, &mut volume, note, |offset| progress.set(offset))
        });
        if taken.is_err() {
            // The host says by itself why it can't be closed; how far it came is noted already.
            let _ = end(false);
            return taken.context(broken);
        }
        end(true)?;
        taken
    }
}

/// The frames of a stream as they come in.
struct Frames<'a, R: Read> {
    input: &'a mut R,
    receiver: Receiver,
}

impl<R: Read> Frames<'_, R> {
    fn next(&mut self, payload: &mut Vec<u8>) -> Result<Part> {
        const BROKEN: &str = "this is no stream of `holdfast send`, or it was damaged on the way";
        let mut head = [0; HEAD_BYTES];
        self.input.read_exact(&mut head).context("the stream ends before its end")?;
        payload.resize(Receiver::payload_bytes(&head).context(BROKEN)?, 0);
        self.input.read_exact(payload).context("the stream ends before its end")?;
        self.receiver.frame(&head, payload).context(BROKEN)
    }
}

fn take_in(
    next: Next,
    volume: &mut Client,
    note: impl Fn(u64) -> Result<()>,
    mut tell: impl FnMut(u64),
) -> Result<Totals> {
    let mut payload = Vec::new();
    let mut noted = Instant::now();
    // Where the stream breaks off what is complete is told all the same.
    let mut done = None;
    let outcome = loop {
        let told = match next(&mut payload) {
            Ok(Part::End(totals)) => break Ok(totals),
            Ok(Part::Data { offset }) => write(volume, offset, &payload).map(|()| offset + payload.len() as u64),
            Ok(Part::Zeroes { offset, len }) => write_zeroes(volume, offset, len).map(|()| offset + len),
            Ok(Part::Begin(_)) => unreachable!("a stream has one beginning"),
            Err(error) => break Err(error),
        };
        match told {
            Ok(offset) => {
                done = Some(offset);
                tell(offset);
            }
            Err(error) => break Err(anyhow::Error::from(error).context("cannot write to the volume")),
        }
        if noted.elapsed() >= NOTE_EVERY {
            noted = Instant::now();
            done.take().map_or(Ok(()), &note)?;
        }
    };
    done.map_or(Ok(()), &note)?;
    outcome
}

fn write(volume: &mut Client, offset: u64, data: &[u8]) -> std::io::Result<()> {
    let pieces = (offset..).step_by(REQUEST_BYTES_MAX).zip(data.chunks(REQUEST_BYTES_MAX));
    pieces.into_iter().try_for_each(|(at, piece)| volume.write(at, piece))
}

fn write_zeroes(volume: &mut Client, offset: u64, len: u64) -> std::io::Result<()> {
    let mut at = offset;
    while at < offset + len {
        let piece = ASKED_BYTES.min(offset + len - at);
        volume.write_zeroes(at, piece as u32)?;
        at += piece;
    }
    Ok(())
}

pub fn changes(args: &ChangesArgs, dir: &GridDir, json: bool) -> Result<()> {
    let context = format!("holdfast:changed:{}", args.from);
    let client = Client::connect_for_status(&dir.nbd_socket(), &args.of, &[&context]);
    let mut client = client.with_context(|| format!("cannot compare {} with {}", args.of, args.from))?;
    let mut changed: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while at < client.size_bytes() {
        let told = client.status(at, ASKED_BYTES.min(client.size_bytes() - at) as u32)?;
        for (len, flags) in &told[0] {
            match changed.last_mut() {
                _ if *flags == 0 => {}
                Some(last) if last.end == at => last.end += len,
                _ => changed.push(at..at + len),
            }
            at += len;
        }
    }
    if json {
        let one = |range: &Range<u64>| json!({ "offset": range.start, "length": range.end - range.start });
        return print_json(&changed.iter().map(one).collect::<Vec<_>>());
    }
    let bytes: u64 = changed.iter().map(|range| range.end - range.start).sum();
    let lines = changed.iter().map(|range| format!("{} +{}\n", range.start, range.end - range.start));
    print(format!("{}{} in {} places", lines.collect::<String>(), Size(bytes), changed.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_read_back() {
        for text in ["vm1@monday/at=0", "a@b/from=c.d-e/at=18446744073709551615"] {
            assert_eq!(text.parse::<Wanted>().unwrap().to_string(), text);
        }
        for text in ["vm1", "@b", "a@", "a@b/at=x", "a@b/to=c", "a@b/"] {
            assert!(text.parse::<Wanted>().is_err(), "{text}");
        }
    }

    #[test]
    fn all_of_a_snapshot_is_what_is_mapped() {
        let told = [vec![(4096, 0), (8192, 3), (4096, 0), (4096, 0)]];
        let (pieces, end) = pieces(100, &told);
        assert_eq!(pieces, [Piece::Data(100..4196), Piece::Data(12388..20580)]);
        assert_eq!(end, 20580);
    }

    #[test]
    fn changes_are_data_or_zeroes_where_both_are_known() {
        let allocation = vec![(10, 0), (10, 3), (20, 0)];
        let changed = vec![(5, 0), (10, 1), (10, 0), (5, 1)];
        let (pieces, end) = pieces(0, &[allocation, changed]);
        assert_eq!(pieces, [Piece::Data(5..10), Piece::Zeroes(10..15), Piece::Data(25..30)]);
        assert_eq!(end, 30);
    }
}
