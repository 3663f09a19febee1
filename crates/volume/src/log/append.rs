//! Appending: entries to legs, acknowledgements to completions, hedges to the standby; and applying what is complete.
//!
//! Protocol rules 2 (the ack rule), 3 (one open ledger), 8 (read grants), 10 (outliers only).

use crate::api::{Effect, Lane, Notice, State};
use crate::basis::Answer;
use crate::controller::{Controller, Out};
use crate::log::window::{Done, Entry};
use crate::map::{CloneInfo, Crcs, Mapped, Place, Snapshot};
use crate::peers::{Ask, Call, Purpose};
use crate::segment::encrypt::Sent;
use holdfast_base::{BlockCrc, Buf, Instant, LedgerId, Lsn, NodeId, Urgency};
use holdfast_format::ledger::{AckRule, Leg};
use holdfast_format::record::{Record, SegmentNo, Share};
use holdfast_format::wire::{GRANT_MS, NodeTimes, Refusal, Reply, Request};
use holdfast_stages::Stage;
use std::sync::Arc;
use std::time::Duration;

/// Grants are renewed on demand when less than this is left of them.
const GRANT_RENEW: Duration = Duration::from_millis(80);

/// A grant counts for this much less than the node promised: clocks of two machines may drift, a little.
const GRANT_MARGIN: Duration = Duration::from_millis(5);

impl Controller {
    /// Gives `record` the next LSN and sends it to the preferred legs.
    pub(crate) fn append(&mut self, record: Record, payload: Buf, crcs: Arc<[BlockCrc]>, done: Done, out: Out) -> Lsn {
        let ledger = self.log.open.as_ref().map(|o| o.id).unwrap_or_default();
        let urgency = match done {
            Done::Write(op) | Done::Modified { op, .. } => self.urgency_of_write(op),
            _ => Urgency::Normal,
        };
        let entry = Entry {
            header: record.encode(),
            record,
            crcs,
            payload,
            encrypted: None,
            done,
            urgency,
            ledger,
            have: 0,
            sent: 0,
            appended_at: self.basis.now,
            acknowledged: None,
            position: 0,
            live_blocks: 0,
            is_hot: false,
            destaging: false,
        };
        let lsn = self.log.push(entry);
        self.send_entry(lsn, 0, out);
        lsn
    }

    pub(crate) fn append_control(&mut self, record: Record, done: Done, out: Out) -> Lsn {
        self.append(record, Buf::empty(), Arc::from([]), done, out)
    }

    /// Forgets log entries that are destaged and that the last durable checkpoint covers (protocol rule 15), as many as
    /// a slice allows.
    pub(crate) fn trim(&mut self, out: Out) {
        let is_early = self.basis.config.mutations.trim_past_commit();
        let upto = if is_early { self.log.completed } else { self.log.completed.min(self.checkpointer.durable().lsn) };
        let (dropped, goes_on) = self.log.trim(upto, self.turn.left(&self.basis));
        self.turn.slice("log: entries are forgotten", dropped);
        self.log.trims_at = goes_on.then(|| self.basis.next_slice_at());
        self.log.trims_untold |= dropped > 0;
        if !goes_on && std::mem::take(&mut self.log.trims_untold) {
            self.send_trims(out);
        }
    }

    /// The next slice of that, if it is due: before other work, as guests may wait for the room that it makes.
    pub(crate) fn drive_trim(&mut self, out: Out) {
        if self.log.trims_at.is_some_and(|at| at <= self.basis.now) {
            self.trim(out);
        }
    }

    /// Tells legs what of the log they may forget.
    fn send_trims(&mut self, out: Out) {
        let (volume, epoch, upto) = (self.basis.config.volume, self.epoch(), self.log.trimmed);
        for ledger in self.root().ledgers.clone() {
            for leg in &ledger.legs {
                if self.peers.leg_usable(*leg) {
                    let request = Request::TrimLedger { device: leg.device, volume, epoch, ledger: ledger.id, upto };
                    self.send(leg.node, Lane::Fast, Purpose::Forget, request, Vec::new(), out);
                }
            }
        }
    }

    /// Sends an entry to the legs in `mask` (the preferred ones where it is zero) that were not asked yet.
    pub(crate) fn send_entry(&mut self, lsn: Lsn, mask: u8, out: Out) {
        let Some(open) = &self.log.open else { return };
        if open.frozen {
            return;
        }
        let (ledger, count) = (open.id, open.legs.len());
        let target = if mask == 0 { open.preferred } else { mask };
        for i in 0..count {
            if target >> i & 1 == 1 {
                let leg = self.log.open.as_ref().expect("still open").legs[i];
                self.send_append(lsn, ledger, i as u8, leg, out);
            }
        }
    }

    /// The entry as it goes to legs of its ledger, encrypted once for each.
    fn as_sent(&mut self, lsn: Lsn) -> Sent {
        let entry = self.log.get(lsn).expect("an entry that is sent is in the window");
        if let Some(sent) = entry.encrypted.as_deref().filter(|sent| sent.is_for(entry.ledger)) {
            return sent.clone();
        }
        let sent = Sent::of(&self.basis.config, lsn, entry, &mut self.encryptions);
        if self.is_encrypted() {
            self.log.get_mut(lsn).expect("just seen").encrypted = Some(Box::new(sent.clone()));
        }
        sent
    }

    fn send_append(&mut self, lsn: Lsn, ledger: LedgerId, index: u8, leg: Leg, out: Out) {
        let (volume, epoch, acked) = (self.basis.config.volume, self.epoch(), self.log.completed);
        let Some(entry) = self.log.get(lsn) else { return };
        if entry.ledger != ledger || entry.sent >> index & 1 == 1 {
            return;
        }
        let forgets = self.basis.config.mutations.hedge_forgets_class() && entry.sent != 0;
        let urgency = if forgets { Urgency::Normal } else { entry.urgency };
        let Sent { header, payload, crcs, .. } = self.as_sent(lsn);
        let request = Request::Append { device: leg.device, volume, epoch, ledger, lsn, acked, header, crcs };
        let payload = if payload.is_empty() { Vec::new() } else { vec![payload] };
        let purpose = Purpose::Append { ledger, leg: index, lsn };
        let ask = Ask::new(leg.node, Lane::Fast, purpose, request, payload).with(urgency);
        if self.peers.send(self.basis.now, ask, out).is_some() {
            self.log.get_mut(lsn).expect("just read").sent |= 1 << index;
        }
    }

    pub(crate) fn on_appended(
        &mut self,
        ledger: LedgerId,
        leg: u8,
        lsn: Lsn,
        sent_at: Instant,
        reply: &Reply,
        out: Out,
    ) {
        match reply {
            Reply::Appended { journal_fill, .. } => {
                self.grant(ledger, leg, sent_at);
                self.note_journal_fill(ledger, leg, *journal_fill);
                if self.log.get(lsn).is_some_and(|entry| entry.ledger == ledger) {
                    self.log.on_held(lsn, leg);
                    self.log.note_acknowledged((self.basis.now, self.basis.answer), lsn);
                }
                if self.basis.config.mutations.late_ack_after_freeze() || self.is_open_ledger(ledger) {
                    self.complete_entries(out);
                }
            }
            Reply::Refused(refusal) => self.on_append_refused(ledger, leg, lsn, *refusal, out),
            other => panic!("a node answered an append with {other:?}"),
        }
    }

    fn is_open_ledger(&self, ledger: LedgerId) -> bool {
        self.log.open.as_ref().is_some_and(|o| o.id == ledger)
    }

    fn on_append_refused(&mut self, ledger: LedgerId, leg: u8, lsn: Lsn, refusal: Refusal, out: Out) {
        self.on_append_lost(ledger, leg, lsn);
        if !self.is_open_ledger(ledger) {
            return;
        }
        self.on_reappend_refused((ledger, leg), refusal, out);
        let Some(open) = self.log.open.as_mut() else { return };
        let home = open.legs[usize::from(leg)];
        match refusal {
            Refusal::UnknownLedger => {
                open.gone |= 1 << leg;
                self.on_legs_changed(out);
            }
            Refusal::UnknownDevice | Refusal::DeviceFailed | Refusal::Invalid | Refusal::Version(_) => {
                self.peers.on_device_failed(home);
                self.on_legs_changed(out);
            }
            // Its journal is full, perhaps with other volumes' entries.
            Refusal::NoSpace => self.on_journal_full(ledger, leg, out),
            Refusal::Busy | Refusal::Checksum | Refusal::UnknownShard => {}
            // Told of before, for all requests alike.
            Refusal::StaleEpoch { .. } => {}
        }
    }

    pub(crate) fn on_append_lost(&mut self, ledger: LedgerId, leg: u8, lsn: Lsn) {
        if let Some(entry) = self.log.get_mut(lsn)
            && entry.ledger == ledger
        {
            entry.sent &= !(1 << leg);
        }
    }

    /// Completes, in LSN order, every entry that has what the rule asks, and applies it.
    pub(crate) fn complete_entries(&mut self, out: Out) {
        if !matches!(self.state, State::Open | State::Closing) {
            return;
        }
        while self.log.next_is_acknowledged(&self.basis.config.mutations) {
            let lsn = self.log.complete_next();
            self.apply(lsn);
            let entry = self.log.get_mut(lsn).expect("just completed");
            entry.encrypted = None;
            let done = std::mem::replace(&mut entry.done, Done::Nothing);
            let (at, answer) = entry.acknowledged.unwrap_or((self.basis.now, None));
            if let Done::Write(op) | Done::Modified { op, .. } = done
                && let Some(op) = self.write_ops.get_mut(op)
            {
                Answer::mark(answer, at, &mut op.trail);
                op.trail.mark_for(self.basis.now, Stage::Earlier, self.basis.answer.map(|answer| answer.node));
            }
            self.on_done(done, out);
        }
    }

    fn on_done(&mut self, done: Done, out: Out) {
        match done {
            Done::Nothing => {}
            Done::Write(op) => self.on_write_part_done(op, out),
            Done::Modified { op, modify } => self.on_modified(op, modify, out),
            Done::Committed(job) => self.on_segment_committed(job, out),
            Done::Checkpointed(checkpoint) => {
                self.drive_checkpointer(out, |checkpointer, around| checkpointer.on_checkpointed(around, checkpoint));
            }
            Done::Rehomed { repair, shard, former } => self.on_rehomed(repair, shard, former, out),
            Done::Freed(segments) => self.on_freed(segments, out),
            Done::PassOver => self.on_pass_over(out),
        }
    }

    pub(crate) fn on_write_part_done(&mut self, token: holdfast_base::Token, out: Out) {
        let Some(op) = self.write_ops.get_mut(token) else { return };
        op.parts -= 1;
        if op.parts == 0 {
            let mut op = self.write_ops.remove(token).expect("just seen");
            if let Some(error) = op.failed {
                return self.reply(op.token, Err(error), out);
            }
            self.counters.writes += 1;
            self.governor.on_answered(self.basis.now.since(op.began_at));
            self.counters.write_bytes += op.bytes;
            op.trail.mark(self.basis.now, Stage::Nodes);
            self.answer_write(op.token, op.trail, out);
        }
    }

    /// Usable legs of the open ledger, as a mask.
    pub(crate) fn usable_legs(&self) -> u8 {
        let Some(open) = &self.log.open else { return 0 };
        let mut mask = 0;
        for (i, leg) in open.legs.iter().enumerate() {
            if self.peers.leg_usable(*leg) {
                mask |= 1 << i;
            }
        }
        mask & !open.gone
    }

    fn bypassed_legs(&self) -> u8 {
        let Some(open) = &self.log.open else { return 0 };
        let bypassed = open.legs.iter().enumerate().filter(|(_, leg)| self.peers.is_bypassed(leg.device));
        bypassed.fold(0, |mask, (i, _)| mask | 1 << i)
    }

    /// A leg became usable or stopped being it: choose again, and bring entries in flight to where they can complete.
    pub(crate) fn on_legs_changed(&mut self, out: Out) {
        self.peers.settle_bypass(&self.basis);
        let (usable, bypassed) = (self.usable_legs(), self.bypassed_legs());
        let Some(open) = &mut self.log.open else { return };
        let preferred = match open.choose_preferred(usable & !bypassed) {
            0 => open.choose_preferred(usable),
            without_bypassed => without_bypassed,
        };
        if preferred == 0 {
            open.preferred = 0;
            self.want_roll(out);
            return;
        }
        open.preferred = preferred;
        self.resend_in_flight(out);
    }

    pub(crate) fn resend_in_flight(&mut self, out: Out) {
        let (from, to) = (self.log.completed.0 + 1, self.log.next_lsn().0);
        for lsn in from..to {
            self.send_entry(Lsn(lsn), 0, out);
        }
    }

    /// The bound of an append has passed: the same entry goes to a leg that was not asked.
    pub(crate) fn hedge_append(&mut self, ledger: LedgerId, lsn: Lsn, out: Out) {
        let (usable, bypassed) = (self.usable_legs(), self.bypassed_legs());
        let Some(open) = &self.log.open else { return };
        if open.id != ledger {
            return;
        }
        let Some(entry) = self.log.get(lsn) else { return };
        if lsn <= self.log.completed || open.rule.is_ack_set(&open.legs, entry.have) {
            return;
        }
        let standby = usable & !entry.sent;
        let standby = if standby & !bypassed != 0 { standby & !bypassed } else { standby };
        if standby != 0 {
            // What completes it, together with what has answered; else one more.
            let enough = open.choose_preferred(entry.have | standby) & standby;
            let target = if enough != 0 { enough } else { 1 << standby.trailing_zeros() };
            self.counters.append_hedges += 1;
            self.send_entry(lsn, target, out);
        }
    }

    /// What an answer to a call is worth knowing of: who gives it, and who was asked before.
    pub(crate) fn answer_to(&self, call: &Call, times: Option<NodeTimes>) -> Answer {
        let instead_of = match call.purpose {
            Purpose::Append { ledger, leg, lsn } => self.other_leg_asked(ledger, leg, lsn),
            Purpose::Fetch { fetch, .. } => self.fetcher.first_asked(fetch),
            _ => None,
        };
        Answer { node: call.node, asked_at: call.sent_at, times, instead_of }
    }

    /// The node of another leg that was asked to have an entry, and has not said that it does.
    fn other_leg_asked(&self, ledger: LedgerId, leg: u8, lsn: Lsn) -> Option<NodeId> {
        let open = self.log.open.as_ref().filter(|open| open.id == ledger)?;
        let entry = self.log.get(lsn).filter(|entry| entry.ledger == ledger)?;
        let late = entry.sent & !entry.have & !(1 << leg);
        (late != 0).then(|| open.legs[late.trailing_zeros() as usize].node)
    }

    // ---- read grants (protocol rule 8) ----

    pub(crate) fn grant(&mut self, ledger: LedgerId, leg: u8, sent_at: Instant) {
        if let Some(open) = &mut self.log.open
            && open.id == ledger
        {
            let until = sent_at + Duration::from_millis(GRANT_MS) - GRANT_MARGIN;
            let grant = &mut open.grants[usize::from(leg)];
            *grant = (*grant).max(until);
            let heeded = &mut open.heeded[usize::from(leg)];
            *heeded = (*heeded).max(sent_at);
        }
    }

    pub(crate) fn on_granted(&mut self, ledger: LedgerId, leg: u8, sent_at: Instant, reply: &Reply, out: Out) {
        self.on_grant_lost(ledger, leg);
        if *reply == Reply::Done {
            self.grant(ledger, leg, sent_at);
            self.serve_granted_reads(out);
        }
    }

    pub(crate) fn on_grant_lost(&mut self, ledger: LedgerId, leg: u8) {
        if let Some(open) = &mut self.log.open
            && open.id == ledger
        {
            open.asked &= !(1 << leg);
        }
    }

    pub(crate) fn may_read(&self) -> bool {
        self.basis.config.mutations.read_without_grant()
            || self.log.open.as_ref().is_some_and(|o| o.granted(self.basis.now))
    }

    /// Whether a read that began then may be answered: under grants, or because nobody else could have answered a write
    /// before it began. Where answers take longer than a grant lasts only the latter comes true.
    pub(crate) fn may_answer(&self, since: Instant) -> bool {
        self.may_read() || self.log.open.as_ref().is_some_and(|o| o.granted_since(self.basis.now, since))
    }

    /// Asks every usable leg whose grant ends before `by` for a new one.
    pub(crate) fn ask_grants(&mut self, by: Instant, out: Out) {
        let Some(open) = &self.log.open else { return };
        let (ledger, volume, epoch) = (open.id, self.basis.config.volume, self.epoch());
        for (i, leg) in open.legs.clone().into_iter().enumerate() {
            let open = self.log.open.as_ref().expect("still open");
            if open.grants[i] > by || open.asked >> i & 1 == 1 || !self.peers.leg_usable(leg) {
                continue;
            }
            let request = Request::Grant { device: leg.device, volume, epoch };
            let purpose = Purpose::Grant { leg: i as u8, ledger };
            if self.send(leg.node, Lane::Fast, purpose, request, Vec::new(), out).is_some() {
                self.log.open.as_mut().expect("still open").asked |= 1 << i;
            }
        }
    }

    /// While reads come in, grants are kept fresh ahead of them.
    pub(crate) fn renew_grants(&mut self, out: Out) {
        let reading = !self.reads.is_empty() || !self.awaiting_grant.is_empty();
        if self.state == State::Open && (reading || self.basis.now.since(self.last_activity) < GRANT_RENEW) {
            let open = self.log.open.as_ref().expect("an open volume has an open ledger");
            let soon = self.basis.now + GRANT_RENEW;
            if !self.grants_last_until(open, soon) {
                self.ask_grants(soon, out);
            }
        }
    }

    fn grants_last_until(&self, open: &crate::log::window::OpenLedger, by: Instant) -> bool {
        open.granted(by)
    }

    // ---- margin (protocol rule 9) ----

    /// Acknowledged entries that fewer usable legs hold than the layout's tolerance asks, whatever rule they were
    /// acknowledged by; and one for an open ledger of such a rule, which the next write would be, or one that has lost
    /// legs and is not replaced yet.
    pub(crate) fn at_risk_entries(&self) -> u64 {
        self.at_risk_apart_from(None)
    }

    /// The same, as if one node were there.
    pub fn at_risk_apart_from(&self, node: Option<NodeId>) -> u64 {
        if !self.basis.is_known() {
            return 0;
        }
        let wanted = self.topology().full_rule();
        let is_there = |leg: &&Leg| Some(leg.node) == node || self.peers.leg_usable(**leg);
        let is_narrow = self.log.open.as_ref().is_some_and(|open| {
            !open.rule.is_at_least(wanted) || self.topology().is_ledger_short(open.legs.iter().filter(is_there))
        });
        let lacking = self.log.held().filter(|(ledger, have, _)| self.lacks_copies(*ledger, *have, wanted, node));
        lacking.map(|(.., entries)| entries).sum::<u64>() + u64::from(is_narrow)
    }

    /// Whether fewer usable legs hold the entry than could.
    pub(crate) fn is_at_risk(&self, entry: &Entry) -> bool {
        self.could_be_on_more(entry.ledger, entry.have)
    }

    /// Whether all that the log has is a checkpoint's, or covered by one, and some of it is on fewer usable legs than it
    /// could be: then another checkpoint ends that.
    pub(crate) fn holds_lost_records(&self) -> bool {
        self.log.all_destaged()
            && self.log.trims_at.is_none()
            && self.log.held().any(|(ledger, have, _)| self.could_be_on_more(ledger, have))
    }

    fn could_be_on_more(&self, ledger: LedgerId, have: u8) -> bool {
        if !self.basis.is_known() {
            return false;
        }
        let Some(found) = self.root().ledgers.iter().find(|l| l.id == ledger) else { return false };
        let wanted = self.topology().rule_now();
        let lacks = |rule| self.lacks_copies(ledger, have, rule, None);
        lacks(found.rule) || lacks(wanted)
    }

    /// Of what these legs of a ledger have. `given` counts as if it were there.
    fn lacks_copies(&self, ledger: LedgerId, have: u8, wanted: AckRule, given: Option<NodeId>) -> bool {
        let Some(ledger) = self.root().ledgers.iter().find(|l| l.id == ledger) else { return false };
        let mut held = 0;
        for (i, leg) in ledger.legs.iter().enumerate() {
            if have >> i & 1 == 1 && (Some(leg.node) == given || self.peers.leg_usable(*leg)) {
                held |= 1 << i;
            }
        }
        !wanted.is_ack_set(&ledger.legs, held)
    }

    pub(crate) fn notice(&mut self, notice: Notice, out: Out) {
        out.push(Effect::Notice(notice));
    }

    // ---- what completed entries change: the one place where a volume changes, live and in replay ----

    /// Applies the completed entry `lsn`.
    pub(crate) fn apply(&mut self, lsn: Lsn) {
        let entry = self.log.get_mut(lsn).expect("a completed entry is in the window");
        let record = match &entry.record {
            Record::Write { key, blocks } => Record::Write { key: *key, blocks: *blocks },
            _ => std::mem::replace(&mut entry.record, Record::Noop),
        };
        match record {
            Record::Write { key, blocks } => {
                let place = Place::Log { lsn, data: entry.payload.clone(), crcs: Crcs::new(Arc::clone(&entry.crcs)) };
                let is_hot = self.map.judge_heat(key.0, u64::from(blocks), &self.segments);
                self.log.get_mut(lsn).expect("just seen").is_hot = is_hot;
                self.log.set_live(lsn, |_| u64::from(blocks));
                self.map_to(key.0, u64::from(blocks), Mapped { place, stamp: lsn });
            }
            Record::Discard { key, blocks } => self.map_to(key.0, blocks, Mapped { place: Place::Zero, stamp: lsn }),
            Record::Commit(commit) => {
                let (map, mut accounts) = self.map_and_accounts();
                map.apply_commit(&commit, None, lsn, &mut accounts);
            }
            Record::CommitPacked(packed) => {
                let (map, mut accounts) = self.map_and_accounts();
                map.apply_commit(&packed.commit, Some(&packed.lengths), lsn, &mut accounts);
            }
            Record::Free { segments } => return self.apply_free(&segments),
            Record::Rehome { segment, homes } => self.segments.rehome(segment, &homes),
            Record::Snapshot { head, frozen, live, name, created_ms, size_bytes } => {
                self.apply_snapshot(frozen, live, Snapshot { name, head, created_ms, size_bytes });
            }
            Record::DropSnapshot { layer } => self.apply_drop(layer),
            Record::Clone { of, head, live, id, name, size_bytes } => {
                self.apply_clone(head, of, live, CloneInfo { id, name, size_bytes });
            }
            Record::DropClone { head } => self.apply_drop_clone(head),
            Record::ResizeClone { head, size_bytes } => self.map.layers_mut().resize_clone(head, size_bytes),
            Record::Rollback { head, to, live } => self.apply_rollback(head, to, live),
            Record::Checkpoint(_) | Record::Noop => return,
            Record::Share(share) => self.apply_share(&share, lsn),
            later @ (Record::Head { .. }
            | Record::WriteReplied { .. }
            | Record::Replied(_)
            | Record::Attribute { .. }) => {
                panic!("entry {lsn} is of feature {:?}, and no volume that uses it is opened", later.feature())
            }
        }
        self.wants.checkpoint = true;
        self.map.set_unfolded();
    }

    fn map_to(&mut self, start: u64, blocks: u64, mapped: Mapped) {
        let (map, mut accounts) = self.map_and_accounts();
        map.map_to(start, blocks, mapped, &mut accounts);
    }

    fn apply_share(&mut self, share: &Share, lsn: Lsn) {
        for shared in &share.segments {
            self.checkpointer.on_named_again(&mut self.segments, shared.segment);
        }
        let (map, mut accounts) = self.map_and_accounts();
        map.apply_share(share, lsn, &mut accounts);
    }

    fn apply_free(&mut self, segments: &[SegmentNo]) {
        for no in segments {
            if let Some(info) = self.segments.get(*no) {
                assert!(!info.is_visible(), "{no:?} is freed while the map names it");
                self.segments.remove(*no);
            }
            self.segments.settle(*no);
        }
    }
}
