"""The Lua scripts that Redis runs. Each runs alone, so it reads and writes without another client in between.

Each text begins with what the caller passes as `keys` and `args`. What the values mean is the callers' business.
"""

from __future__ import annotations

# keys, unless said otherwise: the job, its old and its new queue, its owner's set, its idempotency.

# args: version, id, due at, data, idempotency. Returns whether neither the job nor its idempotency existed.
INSERT_JOB = """
if redis.call('EXISTS', KEYS[1]) == 1 or (ARGV[5] ~= '' and redis.call('EXISTS', KEYS[5]) == 1) then return 0 end
if ARGV[5] ~= '' then redis.call('SET', KEYS[5], ARGV[2]) end
redis.call('HSET', KEYS[1], 'version', ARGV[1], 'data', ARGV[4])
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[2])
redis.call('SADD', KEYS[4], ARGV[2])
return 1
"""

# args: as of INSERT_JOB, then the old version and whether the job stays open (1 or 0). Returns whether the job had the
# old version.
REPLACE_JOB = """
if redis.call('HGET', KEYS[1], 'version') ~= ARGV[6] then return 0 end
redis.call('HSET', KEYS[1], 'version', ARGV[1], 'data', ARGV[4])
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[2])
if ARGV[7] == '0' then redis.call('SREM', KEYS[4], ARGV[2]) end
if ARGV[5] == '' and redis.call('GET', KEYS[5]) == ARGV[2] then redis.call('DEL', KEYS[5]) end
return 1
"""

# args: version, id. Returns whether the job had this version.
DELETE_JOB = """
if redis.call('HGET', KEYS[1], 'version') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('SREM', KEYS[4], ARGV[2])
if redis.call('GET', KEYS[5]) == ARGV[2] then redis.call('DEL', KEYS[5]) end
return 1
"""

# keys: a queue. args: until, limit, prefix of jobs' keys. Returns the ids of jobs that are due, and those of which no
# record is left: they are taken out, else they would be listed for ever.
LIST_DUE_JOBS = """
local present, absent = {}, {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], '-inf', ARGV[1], 'BYSCORE', 'LIMIT', 0, ARGV[2])) do
    if redis.call('EXISTS', ARGV[3] .. id) == 1 then
        present[#present + 1] = id
    else
        redis.call('ZREM', KEYS[1], id)
        absent[#absent + 1] = id
    end
end
return {present, absent}
"""

# keys: the job, the key under which it is set aside, the three queues. args: id, its data as it was read, lifetime in
# s. Returns whether it still had this data.
SET_JOB_ASIDE = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' or (kind == 'hash' and (redis.call('HGET', KEYS[1], 'data') or '') ~= ARGV[2]) then return 0 end
redis.call('RENAME', KEYS[1], KEYS[2])
redis.call('EXPIRE', KEYS[2], ARGV[3])
for index = 3, 5 do redis.call('ZREM', KEYS[index], ARGV[1]) end
return 1
"""

# keys: an idempotency, the job that it names. args: the job's id. Frees an idempotency whose job is gone.
FREE_IDEMPOTENCY = """
if redis.call('EXISTS', KEYS[2]) == 0 and redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
